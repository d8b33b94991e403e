"""Held-out perplexity by number of passes, and downstream tasks."""

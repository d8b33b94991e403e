"""What a run needs, before it runs: memory, traffic, FLOPs, and the dry run."""

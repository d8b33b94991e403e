"""From raw text to packed shards, offline."""

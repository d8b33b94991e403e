"""From packed shards to batches: a global batch is a pure function of the seed and its number."""

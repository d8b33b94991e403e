"""What a run may say: its keys, how they are read, and what contradicts what."""

"""A run directory's owner: attempts, signals, the watchdog, and nodes that are unfit."""

"""Exit codes of a job beside those of the ranks themselves; docs/slurm.md explains each to the user."""

EXIT_SUPERSEDED = 70
EXIT_HUNG = 71
EXIT_CHECK_FAILED = 72
EXIT_STOP_FILE = 73
EXIT_NO_PROGRESS = 74

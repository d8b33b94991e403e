"""Which parameter gets which rule, its update, and the share of it that this rank holds."""

"""wm_ds: train WhiteMatter language models at scale with DeepSpeed."""

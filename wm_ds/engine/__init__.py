"""One optimizer step of the whole run, on top of DeepSpeed."""

"""From a dense model's weights to step 0 of a run: dense.py reads, mapping.py maps, first_step.py writes."""

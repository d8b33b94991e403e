"""Sweeps: many runs that differ in a few settings, trained, measured, collected and drawn."""

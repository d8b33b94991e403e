"""Checkpoints: named fragments written by all ranks, published by one, read at any world size."""

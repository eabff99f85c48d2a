"""Strategies that spread one replica of the model over several workers."""

"""Loaders and batches, divided over the workers."""

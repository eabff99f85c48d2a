"""Gradients on their way: summed in place or in buckets, weighted, counted."""

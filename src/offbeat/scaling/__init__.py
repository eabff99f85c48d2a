"""Measures in short runs how far more workers speed up training, and how large a batch may be."""

from offbeat.scaling._batch_size import BatchSize, batch_size
from offbeat.scaling._scale import Scaling, scale

__all__ = ["BatchSize", "Scaling", "batch_size", "scale"]

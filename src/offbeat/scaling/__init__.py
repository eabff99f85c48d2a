"""Measures in short runs how far more workers speed up training, and how large a batch may be."""

from offbeat.scaling._batch_size import BatchSize, DiversityMethod, RunStage, batch_size
from offbeat.scaling._noise import Noise, largest_batch, noise_of, worth
from offbeat.scaling._scale import Predicted, ScalePoint, Scaling, scale

__all__ = [
    "BatchSize",
    "DiversityMethod",
    "Noise",
    "Predicted",
    "RunStage",
    "ScalePoint",
    "Scaling",
    "batch_size",
    "largest_batch",
    "noise_of",
    "scale",
    "worth",
]

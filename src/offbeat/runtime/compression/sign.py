"""One bit for each number: its sign. What it stands for is the mean magnitude of the number's block.

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019): the scaled sign.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offbeat.runtime.compression.blocks import Blocks


class Signs(Blocks):
    """A set bit is a negative number."""

    bits = 1

    def write(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Mean magnitudes, and signs."""
        scales.copy_(values.abs().mean(1, keepdim=True))
        codes.copy_(torch.from_numpy(np.packbits(np.signbit(values.numpy()), axis=1)))

    def read(self, scales: Tensor, codes: Tensor, values: Tensor) -> None:
        """Plus or minus the scale."""
        values.copy_(torch.from_numpy(np.unpackbits(codes.numpy(), axis=1)))
        scale = scales.to(values.dtype)
        values.mul_(scale * -2).add_(scale)

"""How a tensor is cut over the ways: which ranges of one dimension each way holds, and the whole from the parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def divisors(*sizes: int) -> list[int]:
    """The numbers above 1 by which all of these can be divided."""
    common = math.gcd(*sizes)
    return [number for number in range(2, common + 1) if common % number == 0]


def range_of(size: int, way: int, ways: int) -> tuple[int, int]:
    """What a way has of `size` things; the first ways have one more where they cannot be divided evenly."""
    each, more = divmod(size, ways)
    low = way * each + min(way, more)
    return low, low + each + (way < more)


@dataclass(frozen=True)
class Cut:
    """One dimension of a tensor, cut over the ways.

    A fused tensor (query, key and value in one) consists of several equal blocks, of which each is cut by itself.
    """

    dim: int
    """The dimension that is cut."""
    size: int
    """Its size in the whole tensor."""
    blocks: int = 1
    """Equal blocks side by side along it."""

    def range(self, way: int, ways: int) -> tuple[int, int]:
        """What a way has of each block."""
        return range_of(self.size // self.blocks, way, ways)

    def length(self, way: int, ways: int) -> int:
        """The size of a way's part in this dimension."""
        low, high = self.range(way, ways)
        return (high - low) * self.blocks

    def part(self, tensor: Tensor, way: int, ways: int) -> Tensor:
        """A way's part of a whole tensor, as a tensor of its own."""
        low, high = self.range(way, ways)
        pieces = [block.narrow(self.dim, low, high - low) for block in tensor.chunk(self.blocks, self.dim)]
        return (
            torch.cat(pieces, self.dim) if self.blocks > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the parts of all ways."""
        blocks = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat([own[number] for number in range(self.blocks) for own in blocks], self.dim)

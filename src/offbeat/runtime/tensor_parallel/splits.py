"""What is split, and how: the vocabulary of plans."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import nn

from offbeat.runtime.tensor_parallel.attention import attention_cuts
from offbeat.runtime.tensor_parallel.cuts import Cut
from offbeat.runtime.tensor_parallel.layers import is_linear, linear_cuts


class Manner(StrEnum):
    """How a module is split over the ways."""

    COLUMN = "column"
    """A linear layer by its outputs; a dropout whose input is split like that."""
    ROW = "row"
    """A linear layer by its inputs; the results are summed."""
    HEADS = "heads"
    """Attention by heads: `nn.MultiheadAttention`, or a linear layer that computes query, key and value at once."""
    VOCABULARY = "vocabulary"
    """An embedding or an output layer by the rows of its vocabulary."""
    WHOLE = "whole"
    """Not at all: every way computes it."""


@dataclass(frozen=True)
class Split:
    """One module that is split."""

    name: str
    """The module's name in the model."""
    manner: Manner
    """How it is split."""
    size: int
    """How many things are divided over the ways."""
    things: str
    """What they are: features, heads, rows."""
    chain: str
    """What is split together: a chain stays whole if one of its modules cannot be split."""
    blocks: int = 1
    """Equal blocks of outputs side by side, such as query, key and value."""
    attributes: tuple[str, ...] = ()
    """Attributes of an attention module that depend on its number of heads."""
    enters: str = ""
    """Layers with the same name here have the same input, whose gradient is summed once."""

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: by {self.manner}, {self.size} {self.things}"


def cuts_of(split: Split, module: nn.Module) -> dict[str, Cut]:
    """How the module's own parameters are cut, by name."""
    if isinstance(module, nn.MultiheadAttention):
        return attention_cuts(module)
    if isinstance(module, nn.Embedding):
        return {"weight": Cut(0, module.num_embeddings)}
    if is_linear(module):
        return linear_cuts(module, split.manner is not Manner.ROW, split.blocks)
    return {}

"""A character-level transformer on the source of Python's standard library, a text that is on every machine."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import AdamW, Optimizer

from offbeat.errors import TaskError
from offbeat.task import Data, Task
from offbeat.tasks._common import check_at_least, check_positive, divide, mean_over, once

_SOURCES = (
    *("_pydecimal", "_pyio", "argparse", "ast", "calendar", "configparser", "copy", "csv", "dataclasses", "difflib"),
    *("dis", "doctest", "enum", "fractions", "ftplib", "functools", "heapq", "inspect", "ipaddress", "mailbox"),
    *("optparse", "os", "pickle", "plistlib", "pprint", "random", "shutil", "smtplib", "socket", "statistics"),
    *("subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "traceback", "typing"),
)
"""Modules that are single files in every Python since 3.11."""
_MOST_CHARACTERS = 1_500_000
_ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Known characters; any other (tabs, non-ASCII) is one more symbol."""
_HELD_OUT_CHARACTERS = 16_384  # In validation, and again in the test, so that scoring takes a fraction of a second.


@dataclass(eq=False)
class Text(Task):
    """Predict the next character of Python code with a causal transformer, from up to `context` before it.

    The text is that of the Python that runs, so scores of different versions of Python differ a little.

    Its arguments:
    - `context`: characters that are seen at once; the text is cut into windows of context + 1.
    - `width`: of the representation of a character; a multiple of `heads`.
    - `layers`: attention blocks.
    - `heads`: of the attention.
    - `rate`: learning rate of AdamW.
    """

    target = -2.5
    global_batch = 32
    epochs = 4
    evaluate_every = 50
    evaluate_batch = 64
    score_by_parts = True

    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    rate: float = 3e-3

    def __post_init__(self) -> None:
        width, heads = self.width, self.heads
        check_at_least(1, context=self.context, width=width, layers=self.layers, heads=heads)
        check_positive(rate=self.rate)
        if width % heads:
            raise TaskError(
                f"width={width} cannot be divided over heads={heads}: each head has an equal share. Give a width that "
                f"is a multiple, e.g. {heads * math.ceil(width / heads)}."
            )

    def model(self) -> nn.Module:
        """A sequence of embedding, attention blocks and read-out, which can be cut anywhere."""
        symbols = len(_ALPHABET) + 1
        return nn.Sequential(
            _Embedding(symbols, self.context, self.width),
            *(_Block(self.width, self.heads) for _ in range(self.layers)),
            nn.LayerNorm(self.width),
            nn.Linear(self.width, symbols),
        )

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str]:
        """Attention by heads, the layers after it by column and row."""
        plan = {}
        for name, module in model.named_children():
            if isinstance(module, _Block):
                plan |= {f"{name}.look": "heads", f"{name}.gather": "row"}
                plan |= {f"{name}.think.1": "column", f"{name}.think.3": "row"}
        return plan

    @once
    def data(self) -> Data:
        """Windows of `context` characters, and the same moved on by one."""
        number = {character: place for place, character in enumerate(_ALPHABET)}
        symbols = torch.tensor([number.get(character, len(number)) for character in _standard_library()])
        windows = symbols[: len(symbols) // (self.context + 1) * (self.context + 1)].view(-1, self.context + 1)
        held_out = max(1, _HELD_OUT_CHARACTERS // self.context)
        return divide(windows[:, :-1], windows[:, 1:], validation=held_out, test=held_out)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, in nats per character."""
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """AdamW."""
        return AdamW(params, lr=self.rate, weight_decay=0.01)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """Bits per character, negated."""
        nats = mean_over(data, lambda inputs, target: self.criterion(model(inputs), target).detach() * len(target))
        return -nats / math.log(2)


class _Embedding(nn.Module):
    """Embeds characters and their positions."""

    def __init__(self, symbols: int, context: int, width: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Parameter(torch.randn(context, width) * 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.symbol(inputs) + self.place[: inputs.shape[1]]


class _Block(nn.Module):
    """Causal self-attention, then two layers at each place; both normalized first, both added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.look = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        looked = self.look(self.before_attention(inputs)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = looked.chunk(3, dim=1)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = inputs + self.gather(seen.transpose(1, 2).flatten(-2))
        return attended + self.think(attended)


def _standard_library() -> str:
    """The sources, one after the other, up to a fixed length."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [folder / f"{name}.py" for name in _SOURCES]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise TaskError(
            f"The text to learn from is the source of Python's standard library, and {folder} lacks "
            f"{', '.join(missing)}. This Python comes without its sources; use one that has them, e.g. a virtual "
            f"environment made from python.org's or your distribution's full package."
        )
    return "".join(file.read_text(encoding="utf-8") for file in files)[:_MOST_CHARACTERS]

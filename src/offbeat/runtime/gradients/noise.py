"""Measures during a run how much the workers' gradients differ, from which gradient noise is estimated.

Only the squared norms of a worker's gradient, before and after the exchange, are kept: no pass over single examples is
made, and nothing more is sent until the run ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn import Parameter

from offbeat.runtime.gradients.buckets import hook
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.untrusted_files import read_object

GRADIENTS_FILE = "gradients.json"
"""File of the figures in a run folder."""


class Gauge:
    """One worker's squared norms of gradients, before and after they are exchanged."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parameters: list[Parameter] = []
        self._handles: list[Any] = []
        self._models = 0
        self._examples = 0
        self._step = -1
        self._passes = 0
        self._own = 0.0
        self._rows: list[tuple[float, float, float]] = []
        self._running = False
        self.trouble: str | None = None
        """Why this loop cannot be measured."""
        self.checks: list[dict[str, Any]] = []
        """Results of passes over single examples, where the run makes them."""

    def watch(self, model: nn.Module) -> None:
        """Measure this model's gradients; called before the exchange registers its hooks."""
        new = [p for p in model.parameters() if p.is_floating_point()]
        if any(p.requires_grad for p in new):
            self._models += 1
        if self._models > 1:
            self.trouble = "it trains several models, and each has a noise of its own. Measure them one at a time."
        self._parameters += new
        self._handles += [hook(p, self._ready) for p in new]

    def begin(self, examples: int, step: int) -> None:
        """A batch begins, with `examples` here, after `step` steps."""
        if self._passes and step == self._step:
            self.trouble = (
                "it makes one step of several batches, so that gradients are sums of exchanged and unexchanged ones. "
                "Let it step after every batch."
            )
        self._examples, self._step, self._passes = examples, step, 0

    def _ready(self, _: Tensor) -> None:
        if not self._running:
            self._running = True
            # The exchange's hooks come after this one, and so do their callbacks at the end of backward.
            Variable._execution_engine.queue_callback(self._measure_own)  # pyright: ignore[reportPrivateUsage]

    def _measure_own(self) -> None:
        self._running = False
        self._passes += 1
        if self._passes > 1:
            self.trouble = "it calls backward several times for a batch. Add the losses, and call it once."
        if self._step < 0:
            self.trouble = (
                "its data does not come from a loader that was passed to team.prepare, so the number of examples "
                "behind a gradient is unknown. Pass the loader to prepare()."
            )
        self._own = squared_norm(p.grad for p in self._parameters)
        Variable._execution_engine.queue_callback(self._measure_joint)  # pyright: ignore[reportPrivateUsage]

    def _measure_joint(self) -> None:
        joint = squared_norm(p.grad for p in self._parameters)
        self._rows.append((float(self._examples), self._own, joint))

    def conclude(self, folder: Path | None, examples: int | None) -> None:
        """Gather the workers' measurements, and store them in the folder; all workers call this."""
        troubled = self._group.gather([float(self.trouble is not None)], "the count of what cannot be measured")
        figures: dict[str, Any] = {"workers": self._group.size, "examples": examples, "trouble": self.trouble}
        if not troubled.any() and self._rows:
            figures |= self._joined()
        elif self.trouble is None:
            figures["trouble"] = "no gradient was exchanged." if not self._rows else "another worker could not measure."
        figures["checks"] = self.checks
        if folder is not None and self._group.membership.leads:
            (folder / GRADIENTS_FILE).write_text(json.dumps(figures))

    def _joined(self) -> dict[str, Any]:
        """For every step: examples, workers that had some, and the mean of their squared norms weighted by examples."""
        flat = [value for row in self._rows for value in row[:2]]
        table = self._group.gather(flat, "the norms of gradients").reshape(self._group.size, -1, 2)
        counts, squares = table[:, :, 0], table[:, :, 1]
        total = counts.sum(0)
        return {
            "batch": total.tolist(),
            "parts": (counts > 0).sum(0).tolist(),
            "within": ((counts * squares).sum(0) / total.clamp(min=1.0)).tolist(),
            "joint": [row[2] for row in self._rows],
        }

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def squared_norm(gradients: Iterable[Tensor | None]) -> float:
    """The sum of squares of all gradients."""
    dense = [
        gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
        for gradient in gradients
        if gradient is not None
    ]
    if not dense:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in dense])
    return float(norms.square().sum())


def read_gradients(folder: Path) -> Mapping[str, Any]:
    """The figures of a finished run; empty if there are none."""
    path = folder / GRADIENTS_FILE
    return read_object(path) if path.is_file() else {}

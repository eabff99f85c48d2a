"""A gate at which simulations of federated rounds wait for their turn; plain Python, so that peers can import it.

Also the problem that all of them learn: 1,000 clients with ten examples each.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

CLIENTS, COHORT, EXAMPLES = 1000, 100, 10
RATE = 0.1
LAYERS = (784, 200, 200, 10)
POLL = 0.002
PATIENCE = 1800.0


class Gate:
    """Lets a simulation make some rounds whenever it is its turn, and times them.

    Files in a folder: `NAME.go.K` opens the gate for block K, `NAME.done.K` has its seconds and the loss after it,
    `stop` ends everything.
    """

    def __init__(self, folder: str, name: str, leads: bool = True) -> None:
        self._folder, self._name, self._leads = Path(folder), name, leads
        self._block, self._since = 0, 0.0

    def wait(self, loss: float) -> bool:
        """The rounds of a block are done: report them, and wait for the next; False if there is none."""
        now = time.perf_counter()
        if self._leads:
            done = self._folder / f"{self._name}.done.{self._block}"
            draft = done.with_suffix(".draft")
            draft.write_text(json.dumps({"seconds": now - self._since, "loss": loss}))
            draft.replace(done)
        self._block += 1
        go, deadline = self._folder / f"{self._name}.go.{self._block}", time.monotonic() + PATIENCE
        while not go.exists():
            if (self._folder / "stop").exists():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._name}: nobody opened the gate for block {self._block}")
            time.sleep(POLL)
        self._since = time.perf_counter()
        return True


def problem() -> tuple[Any, Any]:
    """Inputs and labels; a client has ten consecutive ones."""
    import torch

    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS * EXAMPLES, LAYERS[0], generator=random)
    labels = (inputs @ torch.randn(LAYERS[0], LAYERS[-1], generator=random)).argmax(dim=1)
    return inputs, labels


def network() -> Any:
    """The model, always the same."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers = [nn.Linear(*LAYERS[:2]), nn.ReLU(), nn.Linear(*LAYERS[1:3]), nn.ReLU(), nn.Linear(*LAYERS[2:])]
    return nn.Sequential(*layers)

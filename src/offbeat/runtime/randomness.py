"""Random state of a process: saved, restored, and lent to code that draws from the global generators."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = dict[str, Any]
"""The global generators of torch, NumPy and Python, as tensors and numbers."""


def capture() -> State:
    """The state of all global generators of this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {"version": version, "words": torch.tensor(words), "gauss": python_gauss},
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(state: State) -> None:
    """Put all global generators back to a captured state."""
    torch.set_rng_state(state["torch"])
    known = state["numpy"]
    keys = known["keys"].numpy().astype(np.uint32)
    np.random.set_state((known["kind"], keys, known["position"], known["has_gauss"], known["gauss"]))
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


class Generators:
    """The global generators as something that a checkpoint can hold."""

    def state_dict(self) -> State:
        """Their state."""
        return capture()

    def load_state_dict(self, state: State) -> None:
        """Take it back."""
        restore(state)


def seed_everything(seed: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Lent:
    """Random state of its own for a piece of code that draws from the global generators.

    A sampler that anybody may have written draws from whichever global generator it likes. Run inside `use()`, it
    draws the same on every worker, and leaves the workers' own generators alone.
    """

    def __init__(self, seed: int) -> None:
        outside = capture()
        seed_everything(seed)
        self._state = capture()
        restore(outside)

    @contextmanager
    def use(self) -> Generator[None]:
        """Inside, the global generators are the lent ones."""
        outside = capture()
        restore(self._state)
        try:
            yield
        finally:
            self._state = capture()
            restore(outside)

"""Random state of a process: saved, restored, shared, and substituted for code that uses the global generators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = dict[str, Any]
"""The global generators of torch, NumPy and Python, and a loader's own ones, as tensors and numbers."""
_GLOBAL = ("torch", "numpy", "python")


def capture(own: Sequence[torch.Generator] = ()) -> State:
    """The state of all global generators of this process, and of the given ones."""
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
        "own": [generator.get_state() for generator in own],
    }


def restore(state: State, own: Sequence[torch.Generator] = ()) -> None:
    """Restore all global generators, and the given ones."""
    for name in _GLOBAL:
        _restore_one(name, state[name])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    for generator, known in zip(own, state["own"], strict=False):
        generator.set_state(known)


def _restore_one(name: str, known: Any) -> None:
    if name == "torch":
        torch.set_rng_state(known)
    elif name == "numpy":
        keys = known["keys"].numpy().astype(np.uint32)
        np.random.set_state((known["kind"], keys, known["position"], known["has_gauss"], known["gauss"]))
    else:
        random.setstate((known["version"], tuple(known["words"].tolist()), known["gauss"]))


class Generators:
    """The global generators as a stateful object for checkpoints."""

    def state_dict(self) -> State:
        """Their state."""
        return capture()

    def load_state_dict(self, state: State) -> None:
        """Restore it."""
        restore(state)


def seed_everything(seed: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seeded(seed: int) -> State:
    """The state of all global generators after seeding, without changing them."""
    outside = capture()
    seed_everything(seed)
    state = capture()
    restore(outside)
    return state


def packed(state: State) -> Tensor:
    """A state as a row of bytes, whose length depends only on the number of generators; omits CUDA's."""
    return torch.cat([*(_flat(name, state[name]) for name in _GLOBAL), *(own.reshape(-1) for own in state["own"])])


def unpacked(row: Tensor, like: State) -> State:
    """The inverse of `packed`; `like` is any state with as many generators, whose CUDA state is kept."""
    sizes = [_flat(name, like[name]).numel() for name in _GLOBAL] + [own.numel() for own in like["own"]]
    of_torch, of_numpy, of_python, *own = (part.clone() for part in torch.split(row, sizes))
    of_numpy, of_python = of_numpy.view(torch.float64), of_python.view(torch.float64)
    position, has_gauss, gauss = of_numpy[-3:].tolist()
    numpy_state = {"keys": of_numpy[:-3].long(), "position": int(position), "has_gauss": int(has_gauss), "gauss": gauss}
    python_gauss = of_python[-1].item()
    python_state = {"words": of_python[:-1].long(), "gauss": None if math.isnan(python_gauss) else python_gauss}
    return like | {
        "torch": of_torch,
        "numpy": like["numpy"] | numpy_state,
        "python": like["python"] | python_state,
        "own": own,
    }


def _flat(name: str, state: Any) -> Tensor:
    """The state of one global generator as a row of bytes; 32-bit words are exact as doubles."""
    if name == "torch":
        return state
    if name == "numpy":
        words, rest = state["keys"], [state["position"], state["has_gauss"], state["gauss"]]
    else:
        words, rest = state["words"], [math.nan if state["gauss"] is None else state["gauss"]]
    return torch.cat([words.double(), torch.tensor(rest, dtype=torch.float64)]).view(torch.uint8)


class Own:
    """Draws from the generators of this process as they are, as in a script without a team."""

    native = True
    follows = False

    def __init__(self, start: State, generators: Sequence[torch.Generator] = ()) -> None:
        self.start, self._generators = start, generators

    def go_on(self, state: State) -> None:
        """The first item was drawn elsewhere, which left this state: what follows goes on from there."""
        restore(state, self._generators)

    def again(self) -> Own:
        """Itself: native draws happen once."""
        return self

    def stream(self, make: Callable[[], Iterator[Any]], skip: int = 0, _ahead: int = 1) -> Iterator[Any]:
        """The items of `make()` from number `skip` on, drawn on demand."""
        # Skipped items are drawn again from the initial state, so that the rest follows from them.
        if skip:
            now = capture(self._generators)
            restore(self.start, self._generators)
            stream = make()
            for _ in islice(stream, skip):
                pass
            restore(now, self._generators)
        else:
            stream = make()
        yield from stream


class Lent:
    """A substitute random state for code that draws from the global generators.

    A user-defined sampler may draw from any global generator. Run inside `use()`, it draws the same on every worker and
    leaves the workers' own generators alone. Only the generators of a worker that `follows` advance with the draws, as
    they would in a script without a team.
    """

    native = False

    def __init__(self, start: State, generators: Sequence[torch.Generator] = (), follows: bool = False) -> None:
        self.start, self.follows = start, follows
        self._state, self._generators = start, generators
        self._drawn: State | None = None

    @property
    def now(self) -> State:
        """The state after what was drawn so far."""
        return self._state

    def go_on(self, state: State) -> None:
        """The first item was drawn elsewhere, which left this state: what follows goes on from there."""
        self._state = state
        self._hand_over(_GLOBAL if self.follows else (), range(len(self._generators)))

    def again(self) -> Lent:
        """A copy that draws the same again; no global generator follows it."""
        return Lent(self.start, self._generators)

    @contextmanager
    def use(self) -> Generator[None]:
        """Substitute the global generators in the body."""
        outside = capture(self._generators)
        restore(self._state, self._generators)
        try:
            yield
        finally:
            self._state = capture(self._generators)
            restore(outside, self._generators)

    def stream(self, make: Callable[[], Iterator[Any]], skip: int = 0, ahead: int = 1) -> Iterator[Any]:
        """The items of `make()` from number `skip` on, drawn `ahead` at a time, because substitution takes time."""
        return islice(self._stream(make, skip, ahead), skip, None)

    def _stream(self, make: Callable[[], Iterator[Any]], skip: int, ahead: int) -> Iterator[Any]:
        with self.use():
            stream = make()
            block = list(islice(stream, 1))
        # Generators that follow advance from here; those of a resumed run have done so already.
        self._drawn = self._state
        if not skip:
            self._hand_over(_GLOBAL if self.follows else (), range(len(self._generators)))
        while block:
            yield from block
            with self.use():
                block = list(islice(stream, ahead))
        self._end()

    def _end(self) -> None:
        """Everything is drawn: advance generators that nothing else has used in the meantime."""
        begun, now = self._drawn, capture(self._generators)
        if begun is None:
            return
        equal = (name for name in _GLOBAL if torch.equal(_flat(name, begun[name]), _flat(name, now[name])))
        same = list(equal) if self.follows else []
        pairs = enumerate(zip(begun["own"], now["own"], strict=True))
        self._hand_over(same, [i for i, (before, after) in pairs if torch.equal(before, after)])

    def _hand_over(self, names: Sequence[str], numbers: Sequence[int]) -> None:
        for name in names:
            _restore_one(name, self._state[name])
        for number in numbers:
            self._generators[number].set_state(self._state["own"][number])


Draws = Own | Lent  # The random source of a loader in one epoch.

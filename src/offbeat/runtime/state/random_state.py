"""Random state of a process: saved, restored, shared, and lent to code that draws from the global generators."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = dict[str, Any]
"""The global generators of torch, NumPy and Python, and those a user gave to a loader, as tensors and numbers."""

_GLOBAL = ("torch", "numpy", "python")


def capture(own: Sequence[torch.Generator] = ()) -> State:
    """The state of all global generators of this process, and of these."""
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
    """Put all global generators, and these, back to a captured state."""
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


def seeded(seed: int) -> State:
    """The state that all global generators have when they are seeded with this, leaving them as they are."""
    outside = capture()
    seed_everything(seed)
    state = capture()
    restore(outside)
    return state


def packed(state: State) -> Tensor:
    """A state as a row of bytes, as long as that of any other state with as many generators; CUDA's are left out."""
    raw = b"".join(_bytes(name, state[name]) for name in _GLOBAL)
    row = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return torch.cat([row, *(known.reshape(-1) for known in state["own"])])


def unpacked(row: Tensor, like: State) -> State:
    """The state that was packed; `like` is any state with as many generators, whose CUDA state is kept."""
    numpy_like = like["numpy"]
    sizes = [len(_bytes(name, like[name])) for name in _GLOBAL] + [known.numel() for known in like["own"]]
    of_torch, of_numpy, of_python, *own = torch.split(row, sizes)
    keys = 4 * numpy_like["keys"].numel()
    position, has_gauss, gauss = _PLACE.unpack(of_numpy[keys:].numpy().tobytes())
    words = 4 * like["python"]["words"].numel()
    has_python, python_gauss = _GAUSS.unpack(of_python[words:].numpy().tobytes())
    numpy_state = {"position": position, "has_gauss": has_gauss, "gauss": gauss}
    python_state = {"words": _unsigned(of_python[:words]), "gauss": python_gauss if has_python else None}
    return like | {
        "torch": of_torch.clone(),
        "numpy": numpy_like | {"keys": _unsigned(of_numpy[:keys])} | numpy_state,
        "python": like["python"] | python_state,
        "own": [known.clone() for known in own],
    }


_PLACE, _GAUSS = struct.Struct("<qqd"), struct.Struct("<qd")


def _bytes(name: str, known: Any) -> bytes:
    if name == "torch":
        return known.numpy().tobytes()
    words = known["keys" if name == "numpy" else "words"].numpy().astype("<u4").tobytes()
    if name == "numpy":
        return words + _PLACE.pack(known["position"], known["has_gauss"], known["gauss"])
    return words + _GAUSS.pack(known["gauss"] is not None, known["gauss"] or 0.0)


def _unsigned(row: Tensor) -> Tensor:
    return torch.from_numpy(np.frombuffer(row.numpy().tobytes(), "<u4").astype(np.int64))


class Own:
    """A loader that draws from the generators of this process as they are, as it does in a script without a team."""

    native = True
    follows = False

    def __init__(self, start: State, generators: Sequence[torch.Generator] = ()) -> None:
        self.start, self._generators = start, generators

    def again(self) -> Own:
        """Itself: what is drawn natively is drawn once."""
        return self

    def stream(self, make: Callable[[], Iterator[Any]], skip: int = 0, _ahead: int = 1) -> Iterator[Any]:
        """What `make` answers, from number `skip` on, drawn when it is asked for.

        What is skipped is drawn again from the state that all began with, so that the rest belongs to it.
        """
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
    """Random state of its own for a piece of code that draws from the global generators.

    A sampler that anybody may have written draws from whichever global generator it likes. Run inside `use()`, it
    draws the same on every worker, and leaves the workers' own generators alone. Only those of the worker that
    `follows` go on from what was drawn, as they would in a script without a team.
    """

    native = False

    def __init__(self, start: State, generators: Sequence[torch.Generator] = (), follows: bool = False) -> None:
        self.start, self.follows = start, follows
        self._state, self._generators = start, generators
        self._drawn: State | None = None

    def again(self) -> Lent:
        """Another that draws the same, for who must draw it twice; no global generator follows it."""
        return Lent(self.start, self._generators)

    @contextmanager
    def use(self) -> Generator[None]:
        """Inside, the global generators are the lent ones."""
        outside = capture(self._generators)
        restore(self._state, self._generators)
        try:
            yield
        finally:
            self._state = capture(self._generators)
            restore(outside, self._generators)

    def stream(self, make: Callable[[], Iterator[Any]], skip: int = 0, ahead: int = 1) -> Iterator[Any]:
        """What `make` answers, from number `skip` on, drawn `ahead` at a time, because lending takes time."""
        return islice(self._stream(make, skip, ahead), skip, None)

    def _stream(self, make: Callable[[], Iterator[Any]], skip: int, ahead: int) -> Iterator[Any]:
        with self.use():
            stream = make()
            block = list(islice(stream, 1))
        self._begin(resumed=skip > 0)
        while block:
            yield from block
            with self.use():
                block = list(islice(stream, ahead))
        self._end()

    def _begin(self, resumed: bool) -> None:
        """The first is drawn: where generators are followed they go on from here; a resumed run's have done so."""
        self._drawn = self._state
        if not resumed:
            self._hand_over(_GLOBAL if self.follows else (), range(len(self._generators)))

    def _end(self) -> None:
        """All is drawn: generators that nobody else has drawn from in the meantime stand where the lent ones do."""
        begun, now = self._drawn, capture(self._generators)
        if begun is None:
            return
        same = [name for name in _GLOBAL if self.follows and _bytes(name, begun[name]) == _bytes(name, now[name])]
        pairs = enumerate(zip(begun["own"], now["own"], strict=True))
        self._hand_over(same, [i for i, (one, other) in pairs if torch.equal(one, other)])

    def _hand_over(self, names: Sequence[str], numbers: Sequence[int]) -> None:
        for name in names:
            _restore_one(name, self._state[name])
        for number in numbers:
            self._generators[number].set_state(self._state["own"][number])


Draws = Own | Lent
"""Where a loader draws from in one epoch."""

"""The state of one shard: its values, the gradient sum of the current step, the optimizer, and its part of snapshots.

The shard's machine (`protocols.servers.replica.shard`) decides what happens to it. Its values are in memory that is
lent to readers on the same host, so a read costs the server nothing; under `ssp` and `asp`, where updates go on
meanwhile, a read may contain parts of newer updates, but never of older ones.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from offbeat.errors import RunError
from offbeat.protocols.colouring import Keep, Record, Write
from offbeat.protocols.machine import Done, Payload
from offbeat.protocols.servers.messages import Push, Settings
from offbeat.protocols.servers.replica import works
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.compression import Coder, build
from offbeat.runtime.messages import Inbox
from offbeat.runtime.servers.state_inspection import KINDS, extras_of, why_unusable
from offbeat.runtime.servers.updater import GradientSum, Recipe, Updater
from offbeat.runtime.state.snapshots import Kept, draft_of, write_shard
from offbeat.runtime.state.tensor_tree import put_together, take_apart

_KEPT = "kept at version "
_Lending = Callable[[Segment], None]


class SnapshotWriter:
    """Keeps a server's part of a snapshot, its state at the cut and the pushes in flight, and writes it in a thread."""

    def __init__(self, checkpoints: Path, inbox: Inbox) -> None:
        self._checkpoints, self._inbox = checkpoints, inbox
        self._state = b""
        self._kept: list[Kept] = []

    def record(self, state: bytes) -> None:
        """Keep the state at the cut."""
        self._state, self._kept = state, []

    def keep(self, push: Push, payload: Payload, settings: Settings) -> None:
        """Keep a push in flight. It carries only changed settings, but stored alone it needs all of them."""
        numbers = None if payload.handle is None else np.array(payload.handle)
        self._kept.append((structs.replace(push, settings=push.settings or settings), numbers))

    def write(self, work: Write, token: Any) -> Literal[False]:
        """Write it all in a thread, which tells the machine when done."""
        (state, self._state), (kept, self._kept) = (self._state, b""), (self._kept, [])

        def act() -> None:
            try:
                write_shard(draft_of(self._checkpoints, work.colour), work.cut, state, kept)
            except OSError as error:
                print(f"a snapshot could not be written: {error}", file=sys.stderr, flush=True)
                return
            self._inbox.put(Done(token, True))

        threading.Thread(target=act, daemon=True).start()
        return False


class Numbers:
    """A server's data. Performs the work of its machine's `Start` effects."""

    def __init__(self, lend: _Lending, reclaim: _Lending | None = None, writer: SnapshotWriter | None = None) -> None:
        self._lend, self._reclaim, self._writer = lend, reclaim, writer
        self.version = 0
        self._values = np.empty(0, np.float32)
        self._sum = GradientSum(np.empty(0, np.float32))
        self.updater: Updater | None = None  # None until a worker has put values here.
        self._segment: Segment | None = None
        self._handover: Segment | None = None  # A state being handed over.

    def do(self, work: Any, token: Any = None) -> Any:
        """Perform one piece of work; returns its result."""
        match work:
            case works.Inspect(payload, _, start, stop, absent):
                return self._sum.unfit(payload, start, stop, absent)
            case works.InspectState(payload):
                return why_unusable(payload.handle)
            case works.Update():
                reason = "" if self.updater is None else self.updater.update(work, self.version)
                self._sum.restart()
                self.version = work.version
                return reason
            case works.ReduceGradients():
                return None if self.updater is None else self.updater.reduce(work)
            case works.AccumulateGradient(payload, weight):
                self._sum.add(payload, weight, work)
            case works.ReadShard(state, start, stop, kept):
                if kept:
                    return self._hand_over()
                values = self._whole() if state else self._values[max(0, start) : None if stop < 0 else stop]
                return Payload(values.nbytes, values)
            case works.InspectPayload(payload, compressed):
                self._sum.inspect(payload, compressed)
            case works.Release():
                self._release()
            case works.Restore(payload, version):
                self._restore(payload.handle, version)
            case Record() if self._writer is not None:
                self._writer.record(self._whole(kept=True).tobytes())
            case Keep(message=push, payload=payload) if self._writer is not None:
                self._writer.keep(push, payload, () if self.updater is None else self.updater.settings())
            case Write() if self._writer is not None:
                return self._writer.write(work, token)
            case works.Discard() | Record() | Keep() | Write():
                pass
            case _:
                raise RunError(f"a server was told to do {work!r}, which it cannot")
        return None

    def _whole(self, kept: bool = False) -> NDArray[np.uint8]:
        """The serialized state."""
        tensors: dict[str, Tensor] = {"values": torch.from_numpy(self._values)}
        updater = self.updater
        if updater is None:
            return _serialized(tensors, None, {})
        if kept:
            tensors |= {f"{_KEPT}{version}": torch.from_numpy(then) for version, then in updater.kept.items()}
        return _serialized(tensors, updater.now(), updater.state())

    def _hand_over(self) -> Payload:
        """The state for another replica, in memory that it reads directly if it is on this host."""
        self._release()
        state = self._whole(kept=True)
        self._handover = Segment.create(state.nbytes)
        self._lend(self._handover)
        lent = self._handover.bytes[: state.nbytes]
        lent[:] = state
        return Payload(lent.nbytes, lent)

    def _release(self) -> None:
        if self._handover is not None:
            if self._reclaim is not None:
                self._reclaim(self._handover)
            self._handover.give_back()
            self._handover = None

    def _restore(self, state: NDArray[np.uint8], version: int) -> None:
        raw = state.tobytes()
        tensors, extra = load_tensors(raw), extras_of(state)
        del raw  # It may be gigabytes.
        if extra["recipe"] is None:
            return  # The state of an empty shard.
        updater = self.updater = self._make_updater(msgspec.convert(extra["recipe"], Recipe), tensors.pop("values"))
        if extra["state"] is not None:
            updater.load(put_together(extra["state"], tensors))
        self.version = version
        kept = {int(name.removeprefix(_KEPT)): then for name, then in tensors.items() if name.startswith(_KEPT)}
        updater.kept.update((then, kept[then].numpy()) for then in sorted(kept))

    def _make_updater(self, recipe: Recipe, values: Tensor) -> Updater:
        kind = KINDS[recipe.kind]
        self._segment = Segment.create(max(1, values.numel() * kind.itemsize))
        self._lend(self._segment)
        shared = self._segment.tensor(0, values.numel(), kind)
        shared.copy_(values)
        coder: Coder | None = None
        for form in reversed(recipe.coders):
            coder = build(form, seed=recipe.seed, inner=coder)
        self._values, self._sum = shared.numpy(), GradientSum(torch.zeros_like(shared).numpy(), coder)
        return Updater(recipe, self._values, self._sum)


def first_state(
    recipe: Recipe, values: Tensor, held: Mapping[int, Mapping[str, Any]] | None = None
) -> NDArray[np.uint8]:
    """The initial state that a worker puts on a shard, in the form in which states are fetched and restored.

    `held` is existing optimizer state, by the number of the recipe's range.
    """
    state = {str(number): dict(known) for number, known in held.items()} if held else None
    return _serialized({"values": values.detach().contiguous()}, recipe, state)


def _serialized(tensors: dict[str, Tensor], recipe: Recipe | None, state: dict[str, Any] | None) -> NDArray[np.uint8]:
    """Tensors in safetensors format, with everything else in the header."""
    plain = None if state is None else take_apart(state, "state", tensors)
    extra = {"recipe": msgspec.to_builtins(recipe), "state": plain}
    return np.frombuffer(save_tensors(tensors, {"said": json.dumps(extra)}), dtype=np.uint8)

"""The state of one shard: its values, the gradient sum of the current step, the optimizer, and its part of snapshots.

The shard's machine (`protocols.servers.replica.shard`) decides what happens to it. Its values are in memory that is
lent to readers on the same host, so a read costs the server nothing; under `ssp` and `asp`, where updates go on
meanwhile, a read may contain parts of newer updates, but never of older ones.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
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

from offbeat.errors import ProgramError, RunError
from offbeat.protocols.colouring import Keep, Record, Write
from offbeat.protocols.machine import Done, Payload
from offbeat.protocols.servers.messages import Push, Settings
from offbeat.protocols.servers.replica import works
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.compression import Coder, build
from offbeat.runtime.gradients.optimizers import ELEMENT_WISE
from offbeat.runtime.messages import Inbox
from offbeat.runtime.servers.program_optimizer import accepted, looks_at_whole
from offbeat.runtime.servers.updater import ADD, PROGRAM, GradientSum, Recipe, Updater
from offbeat.runtime.state.snapshots import Kept, draft_of, write_shard
from offbeat.runtime.state.tensor_tree import put_together, take_apart

KINDS: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}  # Data types that servers hold.
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
        tensors, extra = load_tensors(raw), json.loads(_header(state)["__metadata__"]["said"])
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


def _header(state: NDArray[np.uint8]) -> dict[str, Any]:
    """The header of the safetensors format."""
    return json.loads(state[8 : 8 + int.from_bytes(state[:8].tobytes(), "little")].tobytes())


def why_unusable(state: NDArray[np.uint8] | None) -> str:
    """Why a server cannot hold this state; empty if it can. Only its header is read."""
    try:
        header = {} if state is None else _header(state)
        plain = json.loads(header["__metadata__"]["said"])["recipe"]
        if plain is None:
            return ""
        recipe = msgspec.convert(plain, Recipe)
        if recipe.kind not in KINDS or header["values"]["dtype"] != {"float32": "F32", "float64": "F64"}[recipe.kind]:
            return f"the state says that its values are {recipe.kind}, and has {header['values']['dtype']}"
        if recipe.optimizer != PROGRAM:
            known = recipe.optimizer in (ADD, *ELEMENT_WISE)
            return "" if known else f"the state needs an optimizer {recipe.optimizer!r}, which no server has"
        program, plan = accepted(recipe.program, recipe.program_hash)
        pieces = sum(map(len, recipe.ranges))
        if looks_at_whole(plan) and pieces > 1:
            return (
                f"the program looks at the whole vector (norm, sum, …), and the trained parameters are in {pieces} "
                f"pieces here: give the optimizer one group, and no frozen parameters between others"
            )
        return _missing_states(program.states, header)
    except ProgramError as error:
        return f"the program is refused: {error}"
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError) as error:
        return f"the state cannot be read ({type(error).__name__}: {error})"


def _missing_states(expected: Sequence[str], header: Mapping[str, Any]) -> str:
    """Why the state vectors in a state are not those of its program; empty if they are, or there are none yet."""
    held: dict[str, set[str]] = {}
    for name in header:
        if name.startswith("state."):
            _, member, vector = name.split(".", 2)
            held.setdefault(member, set()).add(vector)
    for vectors in held.values():
        if vectors != set(expected):
            missing, unknown = sorted(set(expected) - vectors), sorted(vectors - set(expected))
            parts = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has", unknown)) if names]
            return (
                f"the program has the states {', '.join(expected) or '(none)'}, and the saved one {' and '.join(parts)}"
            )
    return ""


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

"""The numbers of one shard: its values, the sum of the step under way, and the optimizer that updates them.

Everything that is to be done to them is said by the shard's machine (`protocols.servers.replica.shard`); here it is
done. The values lie in memory that is lent to readers of the same host. So a read costs the server nothing; under
`ssp` and `asp`, where updates go on meanwhile, it may hold parts of newer updates, but never of older ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from offbeat.errors import RunError
from offbeat.protocols.colouring import Keep, Record, Write
from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.replica.works import (
    AccumulateGradient,
    Discard,
    Inspect,
    InspectPayload,
    ReadShard,
    Release,
    Restore,
    Update,
)
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.compression import Coder, build
from offbeat.runtime.servers.gradient_sum import GradientSum
from offbeat.runtime.servers.snapshot_part import Scribe
from offbeat.runtime.servers.updater import Recipe, Updater
from offbeat.runtime.state.tensor_tree import put_together, take_apart

KINDS: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
"""Kinds of numbers that servers hold."""
_KEPT = "kept at version "
_Lending = Callable[[Segment], None]


class Numbers:
    """What a server holds. `do` is what its machine's `Start` effects are given to."""

    def __init__(self, lend: _Lending, reclaim: _Lending | None = None, scribe: Scribe | None = None) -> None:
        self._lend, self._reclaim, self._scribe = lend, reclaim, scribe
        self.version = 0
        self._values = np.empty(0, np.float32)
        self._sum = GradientSum(np.empty(0, np.float32))
        self._updater: Updater | None = None
        """None until somebody has put values here."""
        self._segment: Segment | None = None
        self._handed: Segment | None = None
        """A state that is being handed over."""

    @property
    def recipe(self) -> Recipe | None:
        """How the values are updated; None until there are any."""
        return None if self._updater is None else self._updater.recipe

    def do(self, work: Any, token: Any = None) -> Any:
        """Do what the machine says; answers what it asks for."""
        match work:
            case Inspect(payload, _, start, stop, absent):
                return self._sum.unfit(payload, start, stop, absent)
            case Update():
                if self._updater is not None:
                    self._updater.update(work, self.version)
                self._sum.restart()
                self.version = work.version
            case AccumulateGradient(payload, weight):
                self._sum.add(payload, weight, work)
            case ReadShard(state, start, stop, kept):
                if kept:
                    return self._handed_over()
                values = self._whole() if state else self._values[max(0, start) : None if stop < 0 else stop]
                return Payload(values.nbytes, values)
            case InspectPayload(payload, letter):
                self._sum.look(payload, letter)
            case Release():
                self._let_go()
            case Restore(payload, version):
                self._restore(payload.handle, version)
            case Discard():
                pass
            case Record() | Keep() | Write():
                return None if self._scribe is None else self._record(work, token, self._scribe)
            case _:
                raise RunError(f"a server was told to do {work!r}, which it cannot")
        return None

    def _record(self, work: Record | Keep | Write, token: Any, scribe: Scribe) -> Any:
        """Do what is to be done for a snapshot."""
        match work:
            case Record():
                scribe.record(self._whole(kept=True).tobytes())
            case Keep(message=push, payload=payload):
                scribe.keep(push, payload, () if self._updater is None else self._updater.settings())
            case Write():
                return scribe.write(work, token)
        return None

    # -- states ------------------------------------------------------------------------------------------------------

    def _whole(self, kept: bool = False) -> NDArray[np.uint8]:
        """The state, as a file has it."""
        tensors: dict[str, Tensor] = {"values": torch.from_numpy(self._values)}
        updater = self._updater
        if updater is None:
            return _written(tensors, None, {})
        if kept:
            tensors |= {f"{_KEPT}{version}": torch.from_numpy(then) for version, then in updater.kept.items()}
        return _written(tensors, updater.now(), updater.state())

    def _handed_over(self) -> Payload:
        """All that another copy needs, in memory that it reads if it is on this host."""
        self._let_go()
        written = self._whole(kept=True)
        self._handed = Segment.create(written.nbytes)
        self._lend(self._handed)
        lent = self._handed.bytes[: written.nbytes]
        lent[:] = written
        return Payload(lent.nbytes, lent)

    def _let_go(self) -> None:
        if self._handed is not None:
            if self._reclaim is not None:
                self._reclaim(self._handed)
            self._handed.give_back()
            self._handed = None

    def _restore(self, written: NDArray[np.uint8], version: int) -> None:
        raw = written.tobytes()
        tensors, said = load_tensors(raw), json.loads(_metadata(raw)["said"])
        del raw  # It may be gigabytes.
        if said["recipe"] is None:
            return  # Of a shard on which nothing was put yet.
        updater = self._updater = self._make(msgspec.convert(said["recipe"], Recipe), tensors.pop("values"))
        if said["state"] is not None:
            updater.load(put_together(said["state"], tensors))
        self.version = version
        kept = {int(name.removeprefix(_KEPT)): then for name, then in tensors.items() if name.startswith(_KEPT)}
        updater.kept.update((then, kept[then].numpy()) for then in sorted(kept))

    def _make(self, recipe: Recipe, values: Tensor) -> Updater:
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
    """What a worker puts on a shard in the beginning, in the form in which states are fetched and put back.

    `held` is what the optimizer knows already, for each of the ranges of the recipe that it knows anything of.
    """
    state = {str(number): dict(known) for number, known in held.items()} if held else None
    return _written({"values": values.detach().contiguous()}, recipe, state)


def _written(tensors: dict[str, Tensor], recipe: Recipe | None, state: dict[str, Any] | None) -> NDArray[np.uint8]:
    """A file of tensors, with everything else in its header."""
    known = None if state is None else take_apart(state, "state", tensors)
    said = {"recipe": msgspec.to_builtins(recipe), "state": known}
    return np.frombuffer(save_tensors(tensors, {"said": json.dumps(said)}), dtype=np.uint8)


def _metadata(raw: bytes) -> dict[str, str]:
    """What stands in the header of a safetensors file beside the tensors."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length])["__metadata__"]

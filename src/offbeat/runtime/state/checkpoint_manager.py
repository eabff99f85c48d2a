"""When a checkpoint is due, which objects of a loop it contains, and resuming from it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat.errors import CheckpointError
from offbeat.runtime.data.loaders import Loader
from offbeat.runtime.groups.group import Group
from offbeat.runtime.state.checkpoint import Checkpoints, newest, newest_step
from offbeat.runtime.state.snapshots import CutWriter, SnapshotCut, discard
from offbeat.runtime.state.tensor_tree import like

_SHARE = 0.05  # Share of a run's time that checkpoints at reports may take.


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state that can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore the state."""
        ...


@runtime_checkable
class Filing(Protocol):
    """Adds files of its own to checkpoints, for what no worker should have to hold at once."""

    def write_files(self, folder: Path) -> None:
        """Write them; called by the worker that leads, while the others wait."""
        ...

    def resume_files(self, folder: Path) -> None:
        """The run is resumed from these files, which stay there until the next checkpoint."""
        ...


class Holdings:
    """The objects given to `team.prepare`, in order."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.loaders: list[Loader] = []
        self.others: list[Stateful] = []
        self.whole: Callable[[], AbstractContextManager[None]] = nullcontext
        """Inside, models and optimizers have their whole state, where workers have parts of them. A collective call."""
        self._searched = False

    def has(self, thing: object) -> bool:
        """Whether this very object is one of them."""
        return any(thing is known for known in (*self.models, *self.optimizers, *self.loaders, *self.others))

    @property
    def trained_loader(self) -> Loader | None:
        """The loader whose epochs are counted: the first one used for training."""
        trained = (loader for loader in self.loaders if loader.epoch or loader.resume_at is not None)
        return next(trained, self.loaders[0] if self.loaders else None)

    @property
    def epoch(self) -> int | None:
        """The current epoch, from 1; None without a loader."""
        loader = self.trained_loader
        return None if loader is None else loader.trained_epochs

    @property
    def examples(self) -> int | None:
        """The number of training examples; None if it is unknown beforehand."""
        try:
            return len(cast("Any", self.trained_loader).dataset)
        except (AttributeError, TypeError):
            return None

    def replicas(self) -> dict[str, Any]:
        """Parameters and optimizer state."""
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_replicas(self, state: Mapping[str, Any], models: Sequence[int], optimizers: Sequence[int]) -> None:
        """Restore the models and optimizers of these numbers."""
        things = [("models", i, self.models[i]) for i in models]
        things += [("optimizers", i, self.optimizers[i]) for i in optimizers]
        for kind, i, thing in things:
            try:
                thing.load_state_dict(_entry(state, kind, i))
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"the checkpoint's {kind[:-1]} does not fit this one: {error}") from error

    def buffers(self) -> list[dict[str, Any]]:
        """Running statistics and so on, which may differ between replicas."""
        return [dict(model.named_buffers()) for model in self.models]

    def load_buffers(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore them."""
        try:
            with torch.no_grad():
                for model, saved in zip(self.models, state, strict=True):
                    for name, buffer in model.named_buffers():
                        buffer.copy_(saved[name])
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint's buffers do not fit this run's models: {error}") from error

    def trainable(self) -> list[list[bool]]:
        """Which parameters of each model are trainable."""
        return [[p.requires_grad for p in model.parameters()] for model in self.models]

    def load_trainable(self, state: Sequence[Sequence[bool]]) -> None:
        """Restore which parameters are trainable."""
        for model, flags in zip(self.models, state, strict=True):
            for parameter, flag in zip(model.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)

    def find_schedulers(self) -> None:
        """Add the learning-rate schedulers of the optimizers, even if they were not given to `prepare`."""
        # A scheduler knows its optimizer, but not vice versa, so all live objects are searched.
        if self._searched:
            return
        self._searched = True
        known = [id(other) for other in self.others]
        live = [item for item in gc.get_objects() if issubclass(type(item), LRScheduler) and id(item) not in known]
        nested = [id(inner) for outer in (*live, *self.others) for inner in getattr(outer, "_schedulers", ())]
        optimizers = [id(optimizer) for optimizer in self.optimizers]
        ours = [s for s in live if id(getattr(s, "optimizer", None)) in optimizers and id(s) not in nested]
        # Live objects come in no order, but saved states must match up in another process.
        self.others += sorted(ours, key=lambda s: (optimizers.index(id(s.optimizer)), type(s).__name__))

    def other_states(self) -> list[list[Any]]:
        """States of schedulers and other objects, each with its class name."""
        return [[type(other).__name__, other.state_dict()] for other in self.others]

    def load_others(self, states: Sequence[Sequence[Any]]) -> None:
        """Restore them."""
        waiting = [list(entry) for entry in states]
        for other in self.others:
            kind = type(other).__name__
            entry = next((entry for entry in waiting if entry[0] == kind), None)
            if entry is None:
                raise CheckpointError(
                    f"the checkpoint holds no state for a {kind}. Resume with the script that wrote it."
                )
            waiting.remove(entry)
            now = other.state_dict()
            other.load_state_dict({key: like(value, now.get(key)) for key, value in entry[1].items()})


class Memory:
    """One worker's side of a run's checkpoints, and of resuming from one; without a folder it saves nothing.

    A resumed run gets its parameters back when they are prepared, and everything else at the very boundary where the
    checkpoint was written, so that it continues to the same bits whatever the loop did before.
    """

    def __init__(
        self,
        folder: Path | None,
        group: Group,
        identity: Mapping[str, Any],
        holdings: Holdings,
        replicated: bool,
        relaid: Callable[[str, str], bool] = lambda _before, _now: False,
        machines: tuple[int, ...] = (),
    ) -> None:
        checkpoints = None if folder is None else folder / "checkpoint"
        self._checkpoints = None if checkpoints is None else Checkpoints(checkpoints, group, identity, relaid, machines)
        self._group, self._holdings, self._replicated = group, holdings, replicated
        if self._checkpoints is not None and group.membership.leads:
            discard(self._checkpoints.folder)  # Parts left by a killed run must not mix with new ones.
        self._own: dict[str, Stateful] = {}
        self._saved: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._written_at = -1
        self._cost, self._since = 0.0, time.monotonic()
        self._asking: int | None = None
        self._cuts = CutWriter()
        self._wanted_at = -1
        self.due = False  # Whether to write a checkpoint at the next boundary.

    def keep(self, **things: Stateful) -> None:
        """Also save the states of these objects, per worker. They are restored in this order."""
        self._own |= things

    def recall(self) -> dict[str, Any]:
        """Read the newest checkpoint; returns its notes."""
        if self._checkpoints is None:
            raise CheckpointError("there is no run folder to resume from. Say which with --resume RUN.")
        shared, own, _ = self._checkpoints.load()
        self._saved = shared, own
        return own["notes"]

    @property
    def resuming(self) -> bool:
        """Whether the state is still to be restored."""
        return self._saved is not None

    def catching_up(self) -> bool:
        """Whether the loop is replaying epochs done before."""
        return self.resuming and any(loader.resume_at is not None for loader in self._holdings.loaders)

    def is_here(self, loader: Loader) -> bool:
        """Whether this loader's boundary is where the checkpoint was written."""
        self._asking = next((i for i, known in enumerate(self._holdings.loaders) if known is loader), None)
        return self._saved is not None and self._saved[1]["loader"] in (None, self._asking)

    def consider(self) -> None:
        """At a report: one is due if worker 0 finds it affordable."""
        if self._checkpoints is not None:
            affordable = self._cost < _SHARE * (time.monotonic() - self._since)
            self.due = self.due or self._group.gather([float(affordable)], "a report")[0].item() > 0

    def catch_up(self, steps: int, step: int) -> None:
        """At a report: one is due if worker 0 finds snapshots two behind: where workers meet often, some fail."""
        if self._checkpoints is not None:
            behind = step // steps - newest_step(self._checkpoints.folder) // steps
            self.due = self.due or self._group.gather([float(behind >= 2)], "a report")[0].item() > 0

    def every(self, steps: int | None, step: int) -> bool:
        """Whether a checkpoint is due at this step, or was due at an earlier one done without this worker."""
        return steps is not None and step // steps > max(self._written_at, 0) // steps

    def wants_snapshot(self, steps: int | None, step: int) -> bool:
        """Whether to request a snapshot at this step; true once per step."""
        since = max(self._written_at, self._wanted_at, 0)
        due = steps is not None and self._checkpoints is not None and step // steps > since // steps
        if due:
            self._wanted_at = step
        return due

    def publish_complete(self, at_end: bool = False) -> None:
        """Publish the newest complete snapshot and drop older drafts; at the end, drop all drafts."""
        if (kept := self._checkpoints) is not None:
            self._cuts.publish(kept.folder, kept.identity, self._group.membership.members, at_end)

    def close(self) -> None:
        """Wait for pending writes."""
        self._cuts.close()

    @property
    def written_at(self) -> int:
        """The step of the newest checkpoint that this run has written or was resumed from; -1 if there is none."""
        return self._written_at

    def save(self, step: int, at_end: bool, **notes: Any) -> None:
        """Write a checkpoint with notes, unless this step has one; a collective call."""
        if self._checkpoints is None or self._written_at == step:
            return
        start = time.monotonic()
        held = self._holdings
        held.find_schedulers()
        with held.whole():
            shared = {**held.replicas(), "others": held.other_states()}
            things = {name: thing.state_dict() for name, thing in self._own.items()}
            own = self._state({} if self._replicated else held.replicas(), things, at_end, step=step, **notes)
            files = [thing.write_files for thing in self._own.values() if isinstance(thing, Filing)]
            self._checkpoints.save(step, shared, own, {"step": step}, files)
        self.due = False
        self._written_at = step
        self._since = time.monotonic()
        self._cost = self._since - start

    def _state(self, replicas: dict[str, Any], things: dict[str, Any], at_end: bool, **notes: Any) -> dict[str, Any]:
        held = self._holdings
        return {
            "replicas": replicas,
            "buffers": held.buffers(),
            "trainable": held.trainable(),
            "loaders": [loader.state_dict(at_end) for loader in held.loaders],
            "loader": self._asking,
            "things": things,
            "notes": notes,
        }

    def cut(self, cut: SnapshotCut, **notes: Any) -> None:
        """Write this worker's part of a snapshot while training goes on."""
        if self._checkpoints is None:
            return
        held = self._holdings
        held.find_schedulers()
        others = {name: thing.state_dict() for name, thing in self._own.items() if name != "exchange"}
        # In the order of restoring.
        things = {name: cut.state if name == "exchange" else others[name] for name in self._own}
        own = self._state(held.replicas(), things, False, **notes) | {"others": held.other_states()}
        self._cuts.write(self._checkpoints.folder, self._group.rank, cut, own)

    def give_back(self, models: int, optimizers: int, *names: str) -> None:
        """Restore what was just prepared (from these numbers on), and the named objects."""
        if self._saved is None:
            return
        shared, own = self._saved
        held = self._holdings
        new = range(models, len(held.models)), range(optimizers, len(held.optimizers))
        held.load_replicas(own["replicas"] or shared, *new)
        for loader, state in zip(held.loaders, own["loaders"], strict=False):
            if loader.epoch == 0 and loader.resume_at is None:
                loader.load_state_dict(state)
        for name in set(names) & set(own["things"]):
            self._own[name].load_state_dict(own["things"][name])

    def give_back_account(self) -> None:
        """Restore the totals, if the run ends before it reaches the checkpoint's boundary."""
        self.give_back(len(self._holdings.models), len(self._holdings.optimizers), "group", "reports")

    def go_back(self) -> None:
        """Restore everything, at the boundary where the checkpoint was written."""
        if self._saved is None:
            return
        (shared, own), self._saved = self._saved, None
        held = self._holdings
        held.find_schedulers()
        held.load_replicas(own["replicas"] or shared, range(len(held.models)), range(len(held.optimizers)))
        held.load_buffers(own["buffers"])
        held.load_trainable(own["trainable"])
        held.load_others(shared["others"])
        path = None if self._checkpoints is None else newest(self._checkpoints.folder)
        for name, thing in self._own.items():
            if name in own["things"]:
                thing.load_state_dict(own["things"][name])
            if isinstance(thing, Filing) and path is not None:
                thing.resume_files(path)
        self._written_at = own["notes"]["step"]


def _entry(state: Mapping[str, Any], kind: str, number: int) -> dict[str, Any]:
    held = cast("list[dict[str, Any]]", state[kind])
    if number >= len(held):
        raise CheckpointError(
            f"the checkpoint holds {len(held)} {kind}, this run has more. Resume with the script that wrote it."
        )
    return held[number]

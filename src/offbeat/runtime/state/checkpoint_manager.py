"""What a run remembers of itself: when a checkpoint is due, what it holds, and the way back from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import CheckpointError
from offbeat.runtime.data.loaders import Loader
from offbeat.runtime.groups.group import Group
from offbeat.runtime.state.checkpoint import Checkpoints, newest_step
from offbeat.runtime.state.prepared import Holdings, Stateful
from offbeat.runtime.state.snapshots import CutWriter, SnapshotCut, discard

_SHARE = 0.05
"""The share of a run's time that checkpoints at reports may take."""


class Memory:
    """One worker's side of the checkpoints of a run, and of going on from one.

    A resumed run gets its parameters back when they are prepared, and everything else at the very boundary where the
    checkpoint was written, so that it goes on to the same bits whatever the loop did before it came there.
    """

    def __init__(self, checkpoints: Checkpoints | None, group: Group, holdings: Holdings, replicated: bool) -> None:
        self._checkpoints, self._group, self._holdings = checkpoints, group, holdings
        self._replicated = replicated
        self._own: dict[str, Stateful] = {}
        self._saved: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._written_at = -1
        self._cost, self._since = 0.0, time.monotonic()
        self._asking: int | None = None
        self._cuts = CutWriter()
        self._wanted_at = -1
        self.due = False
        """Whether a checkpoint is to be written at the next boundary."""

    def keep(self, **things: Stateful) -> None:
        """Remember the state of these too; it is each worker's own. They are put back in this order."""
        self._own |= things

    def recall(self) -> dict[str, Any]:
        """Read the newest checkpoint; answers what was noted with it."""
        if self._checkpoints is None:
            raise CheckpointError("there is no run folder to resume from. Say which with --resume RUN.")
        shared, own, _ = self._checkpoints.load()
        self._saved = shared, own
        return own["notes"]

    @property
    def resuming(self) -> bool:
        """Whether the way back is still to come."""
        return self._saved is not None

    def catching_up(self) -> bool:
        """Whether the loop is going through epochs that were done before."""
        return self.resuming and any(loader.resume_at is not None for loader in self._holdings.loaders)

    def is_here(self, loader: Loader) -> bool:
        """Whether the boundary of this loader is the one that the checkpoint was written at."""
        self._asking = next((i for i, known in enumerate(self._holdings.loaders) if known is loader), None)
        return self._saved is not None and self._saved[1]["loader"] in (None, self._asking)

    def consider(self) -> None:
        """At a report: a checkpoint is due if it can be afforded, as worker 0 says."""
        if self._checkpoints is not None:
            affordable = self._cost < _SHARE * (time.monotonic() - self._since)
            self.due = self.due or self._group.gather([float(affordable)], "a report")[0].item() > 0

    def catch_up(self, steps: int, step: int) -> None:
        """At a report, where all have met: a checkpoint is due if snapshots are two behind, as worker 0 says.

        Where workers meet every few steps, snapshots between two meetings may not come about.
        """
        if self._checkpoints is not None:
            behind = step // steps - newest_step(self._checkpoints.folder) // steps
            self.due = self.due or self._group.gather([float(behind >= 2)], "a report")[0].item() > 0

    def every(self, steps: int | None, step: int) -> bool:
        """Whether a checkpoint is due at this step, or was at one that was made without this worker."""
        return steps is not None and step // steps > max(self._written_at, 0) // steps

    def wants_snapshot(self, steps: int | None, step: int) -> bool:
        """Whether a snapshot is to be asked for at this step, and was not yet."""
        since = max(self._written_at, self._wanted_at, 0)
        due = steps is not None and self._checkpoints is not None and step // steps > since // steps
        if due:
            self._wanted_at = step
        return due

    def publish_complete(self, at_end: bool = False) -> None:
        """Publish the newest snapshot whose parts are all there, and leave older ones; at the end, all."""
        if self._checkpoints is not None:
            self._cuts.publish(
                self._checkpoints.folder, self._checkpoints.identity, self._group.membership.members, at_end
            )

    def close(self) -> None:
        """Wait until what is being written is on the disk."""
        self._cuts.close()

    def save(self, step: int, at_end: bool, **notes: Any) -> None:
        """Write a checkpoint, with some notes, unless this step has one; all workers together."""
        if self._checkpoints is None or self._written_at == step:
            return
        start = time.monotonic()
        held = self._holdings
        held.find_schedulers()
        shared = {**held.replicas(), "others": held.other_states()}
        things = {name: thing.state_dict() for name, thing in self._own.items()}
        own = self._state({} if self._replicated else held.replicas(), things, at_end, step=step, **notes)
        self._checkpoints.save(step, shared, own, {"step": step})
        self.due = False
        self._written_at = step
        self._since = time.monotonic()
        self._cost = self._since - start

    def _state(self, replicas: dict[str, Any], things: dict[str, Any], at_end: bool, **notes: Any) -> dict[str, Any]:
        """What is this worker's own."""
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
        """Write this worker's part of a snapshot, beside the work that goes on."""
        if self._checkpoints is None:
            return
        held = self._holdings
        held.find_schedulers()
        others = {name: thing.state_dict() for name, thing in self._own.items() if name != "exchange"}
        # In the order in which they are put back.
        things = {name: cut.state if name == "exchange" else others[name] for name in self._own}
        own = self._state(held.replicas(), things, False, **notes) | {"others": held.other_states()}
        self._cuts.write(self._checkpoints.folder, self._group.rank, cut, own)

    def give_back(self, models: int, optimizers: int, *names: str) -> None:
        """To what was just prepared (from these numbers on), and to these things: the state that they had."""
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
        """Count on from the checkpoint, if the run ends before it has come to where that was written."""
        self.give_back(len(self._holdings.models), len(self._holdings.optimizers), "group", "reports")

    def go_back(self) -> None:
        """At the boundary where the checkpoint was written: everything has the bits that it had there."""
        if self._saved is None:
            return
        (shared, own), self._saved = self._saved, None
        held = self._holdings
        held.find_schedulers()
        held.load_replicas(own["replicas"] or shared, range(len(held.models)), range(len(held.optimizers)))
        held.load_buffers(own["buffers"])
        held.load_trainable(own["trainable"])
        held.load_others(shared["others"])
        for name, thing in self._own.items():
            if name in own["things"]:
                thing.load_state_dict(own["things"][name])
        self._written_at = own["notes"]["step"]


def open_memory(
    folder: Path | None, group: Group, identity: Mapping[str, Any], holdings: Holdings, replicated: bool
) -> Memory:
    """The memory of a run that leaves its checkpoints in a folder; without one it forgets everything."""
    checkpoints = None if folder is None else Checkpoints(folder / "checkpoint", group, identity)
    if checkpoints is not None and group.membership.leads:
        discard(checkpoints.folder)  # Parts that a run which was killed has left must not mix with new ones.
    return Memory(checkpoints, group, holdings, replicated)

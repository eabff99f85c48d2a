"""Snapshots on disk: each process writes its part while the run goes on; then the whole is published.

Each file of a draft records where it was cut: `worker-<rank>`, `shard-<n>` (its whole state) and `channel-<n>` (pushes
in flight to it). Complete, they get a certificate and a manifest, and become a checkpoint by one rename.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from offbeat.errors import CheckpointError
from offbeat.protocols.gossip.snapshots import GossipCut
from offbeat.protocols.servers.messages import Push, ShardCut
from offbeat.runtime.groups.group import Group
from offbeat.runtime.state import certificates
from offbeat.runtime.state.checkpoint import file_of, metadata_of, publish, remove, write_tensors
from offbeat.runtime.state.tensor_tree import take_apart

DRAFT = ".snapshot-"

Kept = tuple[Push, NDArray[np.uint8] | None]
"""A push in flight, and a copy of its numbers; None: it only advances the clock."""


class SnapshotCut(NamedTuple):
    """The cut of a worker: the state of its exchange, and what to do once it is written."""

    colour: int
    place: msgspec.Struct | None  # Where it was cut; None: `more` writes it.
    state: dict[str, Any]
    written: Callable[[], None] | None = None  # Called once it is on disk.
    more: Callable[[Path], None] | None = None  # Writes the messages in flight to it, once all have arrived.


def draft_of(checkpoints: Path, colour: int) -> Path:
    """The folder for the parts of a snapshot."""
    return checkpoints / f"{DRAFT}{colour:06d}"


class CutWriter:
    """Writes a worker's parts of snapshots in a thread, one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._publishing: threading.Thread | None = None

    def publish(self, checkpoints: Path, identity: Mapping[str, Any], ranks: Sequence[int], at_end: bool) -> None:
        """For pairwise gossip: publish the newest snapshot with parts of all these ranks, and remove older drafts."""
        if self._publishing is not None and (at_end or not self._publishing.is_alive()):
            self._publishing.join()
            self._publishing = None
        if at_end:
            discard(checkpoints)
        elif self._publishing is None:
            files = [name(rank) for rank in ranks for name in (file_of, certificates.channel_file)]
            if complete := complete_drafts(checkpoints, files):
                arguments = (checkpoints, complete[-1], identity, files)
                self._publishing = threading.Thread(target=_publish_pairs, args=arguments, name="offbeat publish")
                self._publishing.start()

    def write(self, checkpoints: Path, rank: int, cut: SnapshotCut, state: Mapping[str, Any]) -> None:
        """Copy the state now, and write it while the worker goes on."""
        tensors: dict[str, Any] = {}
        metadata = {
            "data": json.dumps(take_apart(state, "state", tensors)),
            "step": str(state["notes"]["step"]),
            **({} if cut.place is None else {"cut": json.dumps(msgspec.to_builtins(cut.place))}),
        }
        self.close()
        folder = draft_of(checkpoints, cut.colour)

        def act() -> None:
            try:
                write_part(folder, file_of(rank), tensors, metadata)
                if cut.more is not None:
                    cut.more(folder)
            except (OSError, SafetensorError) as error:
                print(f"a snapshot could not be written: {error}", file=sys.stderr, flush=True)
            else:
                if cut.written is not None:
                    cut.written()

        self._thread = threading.Thread(target=act, name="offbeat snapshot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the current write."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _publish_pairs(checkpoints: Path, colour: int, identity: Mapping[str, Any], files: Sequence[str]) -> None:
    try:
        publish_snapshot(checkpoints, colour, "gossip", 0, identity, files)
    except (OSError, CheckpointError) as error:
        print(f"snapshot {colour} was not published: {error}", file=sys.stderr, flush=True)
        discard(checkpoints, colour)
    for older in (path for path in checkpoints.glob(f"{DRAFT}*") if path.name < draft_of(checkpoints, colour).name):
        remove(older)


def write_part(folder: Path, name: str, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a file of a draft atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{name}"
    write_tensors(hidden, tensors, metadata)
    hidden.rename(folder / name)


def write_shard(folder: Path, cut: ShardCut, state: bytes, kept: Sequence[Kept]) -> None:
    """Write a shard's part: its state at the cut, and the pushes in flight to it."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".shard-{cut.shard}"
    hidden.write_bytes(state)
    hidden.rename(folder / certificates.shard_file(cut.shard))
    tensors = {f"push.{i}": torch.from_numpy(numbers) for i, (_, numbers) in enumerate(kept) if numbers is not None}
    metadata = {
        "cut": json.dumps(msgspec.to_builtins(cut)),
        "pushes": json.dumps([msgspec.to_builtins(push) for push, _ in kept]),
    }
    write_part(folder, certificates.channel_file(cut.shard), tensors, metadata)


def write_moves(folder: Path, cut: GossipCut, moves: Sequence[NDArray[Any]]) -> None:
    """Write the moves in flight to a worker of pairwise gossip."""
    tensors = {f"move.{i}": torch.from_numpy(move) for i, move in enumerate(moves)}
    name = certificates.channel_file(cut.worker)
    write_part(folder, name, tensors, {"cut": json.dumps(msgspec.to_builtins(cut))})


def complete_drafts(checkpoints: Path, files: Sequence[str]) -> list[int]:
    """Numbers of the snapshots that have all these files."""
    drafts = checkpoints.glob(f"{DRAFT}*") if checkpoints.is_dir() else ()
    return sorted(
        int(path.name.removeprefix(DRAFT)) for path in drafts if all((path / name).exists() for name in files)
    )


def publish_snapshot(
    checkpoints: Path,
    colour: int,
    kind: certificates.Kind,
    epoch: int,
    identity: Mapping[str, Any],
    files: Sequence[str],
) -> Path:
    """Certify a complete snapshot, and make it the newest checkpoint."""
    draft = draft_of(checkpoints, colour)
    for stray in (path for path in draft.iterdir() if path.name not in files):
        stray.unlink()
    certificates.issue(draft, kind=kind, colour=colour, epoch=epoch, run=checkpoints.parent.name)
    step = max(int(metadata_of(draft / name)["step"]) for name in files if name.startswith("worker-"))
    return publish(draft, checkpoints, step, int(identity["workers"]), identity, {"step": step, "snapshot": colour})


def discard(checkpoints: Path, colour: int | None = None) -> None:
    """Remove the draft of a failed snapshot; all drafts if none is named."""
    drafts = checkpoints.glob(f"{DRAFT}*") if colour is None else [draft_of(checkpoints, colour)]
    for path in drafts:
        remove(path)


# -- resuming ----------------------------------------------------------------------------------------------------------


def put_in_place(path: Path, own: dict[str, Any], group: Group) -> None:
    """Put the rest of what a worker needs to resume from a snapshot into its exchange's state."""
    checked = certificates.check(path)
    if checked.faults:
        raise CheckpointError(
            f"{path} is refused: {'; '.join(checked.faults)}. Remove that folder to resume from an older checkpoint."
        )
    certificate = certificates.read(path)
    exchange = cast("dict[str, Any]", own["things"]["exchange"])
    if certificate.kind == "servers":
        exchange["resumed"] = _shards_of(path, certificate, group)
        if "accrued" in exchange and group.rank not in {cut.worker for cut in certificate.workers}:
            exchange["accrued"] = None  # Another worker's unpushed gradients are its own to push.
        return
    ranks = [cut.worker for cut in certificate.pairs]
    # A worker that had died has another's row, and applies the moves in flight to that one.
    whose = group.rank if group.rank in ranks else min(ranks)
    for move in load_file(path / certificates.channel_file(whose)).values():
        exchange["row"] = exchange["row"] - move


def _shards_of(path: Path, certificate: certificates.Certificate, group: Group) -> dict[str, Any]:
    """Shard states for the leader; for each worker its number of pushes sent, and its own pushes in flight."""
    # A worker that had died starts where the first of the others was.
    cuts = {cut.worker: cut for cut in certificate.workers}
    first = certificate.workers[0]
    mine = cuts.get(group.rank)
    took: list[list[list[int]]] = []
    under_way: list[tuple[int, dict[str, Any], Any]] = []
    states: list[Any] = []
    for shard in certificate.shards:
        late = {worker for worker, _ in shard.in_flight}
        known = {
            worker: [worker, pushes, clock if worker in late else cuts[worker].clock]
            for worker, _, pushes, clock in shard.taken
            if worker in cuts
        }
        took.append([known.get(worker, [worker, 0, first.clock]) for worker in range(group.size)])
        file = path / certificates.channel_file(shard.shard)
        tensors = load_file(file)
        for number, push in enumerate(json.loads(metadata_of(file)["pushes"])):
            if push["worker"] == group.rank and mine is not None:
                under_way.append((shard.shard, push, tensors.get(f"push.{number}")))
        if group.membership.leads:
            raw = (path / certificates.shard_file(shard.shard)).read_bytes()
            states.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return {
        "states": states,
        "versions": [shard.version for shard in certificate.shards],
        "took": took,
        "sent": list(mine.pushes) if mine else [0] * len(certificate.shards),
        "under_way": under_way,
    }

"""A server process: one replica of one shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offbeat.protocols import disturbances
from offbeat.protocols.machine import Effect, Event, Start
from offbeat.protocols.servers.messages import COORDINATOR, server_name
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.works import Restore
from offbeat.runtime.disturb import Disturber
from offbeat.runtime.events.recorder import RECORDER, Mark, Recorder, server_events_file
from offbeat.runtime.events.servers import Serves
from offbeat.runtime.launch import Control
from offbeat.runtime.messages import Endpoint, Inbox, drive
from offbeat.runtime.servers.plan import Lines, ServerPlan
from offbeat.runtime.servers.shard_state import Numbers, SnapshotWriter
from offbeat.runtime.system.malloc import keep_freed_memory


class _Watch:
    """Follows a server's machine: connects it to new peers, records its events, and injects faults.

    A server's step, for `--disturb`, is its minimum clock.
    """

    def __init__(
        self,
        machine: ServerMachine,
        lines: Lines,
        disturb: Callable[[int | None], Disturber],
        recorder: Recorder | None,
    ) -> None:
        self._machine, self._lines, self._disturb = machine, lines, disturb
        self._disturber = disturb(None) if machine.serving else None
        self._view = machine.view
        self._notes = None if recorder is None else Serves(recorder, machine)

    def after(self, event: Event, effects: Sequence[Effect]) -> None:
        """Called after each event, before its effects are performed."""
        machine = self._machine
        if self._view is not machine.view:
            self._view = machine.view
            self._lines.reach(peers_of(machine))
        if self._notes is not None:
            self._notes.after(event, effects)
        if (self._disturber is None or self._disturber.active) and machine.serving:
            step = machine.shard.minimum
            # Faults up to here hit the previous primary, and may be why this one serves.
            self._disturber = self._disturber or self._disturb(step)
            if any(isinstance(effect, Start) and isinstance(effect.work, Restore) for effect in effects):
                self._disturber.go_on_from(step)
            self._disturber.step(step)

    def close(self) -> None:
        """Inject no more faults."""
        if self._disturber is not None:
            self._disturber.close()


def peers_of(machine: ServerMachine) -> list[str]:
    """The servers that a server sends to: copies of its shard and, where updates take sums over all, other shards."""
    view = machine.view
    others = view.primaries if machine.shard.rule.reductions else ()
    return [*view.replicas(machine.number), *filter(None, others)]


def serve(config: Mapping[str, Any], control: Control) -> None:
    """The entry function of a server process."""
    keep_freed_memory()
    plan = ServerPlan.from_plain(config["plan"])
    shard, replica = int(config["shard"]), int(config["replica"])
    name = server_name(shard, replica)
    endpoint: Endpoint[Any] = Endpoint(name, plan.codec(), bind=plan.address(name), keys=plan.keys)
    faults = [disturbances.parse(sentence) for sentence in config["disturb"]]

    def disturb(after: int | None) -> Disturber:
        """Faults of server k apply to the current primary of shard k."""
        return Disturber(faults, "server", shard, int(config["seed"]), control.send, after=after)

    joins = replica > plan.replicas
    machine = ServerMachine(name, shard, plan.rule, plan.view, timing=plan.timing, joins=joins)
    inbox = Inbox(endpoint)
    writer = SnapshotWriter(Path(config["checkpoints"]), inbox) if config.get("checkpoints") else None
    numbers = Numbers(endpoint.lend, endpoint.reclaim, writer)
    recorder = _recorder(config, shard, replica)
    lines = Lines(plan, endpoint)
    watch = _Watch(machine, lines, disturb, recorder)
    try:
        lines.reach([COORDINATOR, *peers_of(machine)])
        drive(machine, endpoint, numbers.do, until=lambda: machine.retired, inbox=inbox, after=watch.after)
        print(
            f"{name} gave no sign of life for {plan.timing.silence:g} s and was declared dead (epoch "
            f"{machine.view.epoch} was its last): it serves nothing any more.",
            file=sys.stderr,
            flush=True,
        )
    finally:
        with suppress(KeyboardInterrupt):
            if machine.serving:
                control.send({"kind": "server", **account(shard, machine, endpoint)})
            watch.close()
            endpoint.close()
            if recorder is not None:
                recorder.stamp(int(Mark.END))


def _recorder(config: Mapping[str, Any], shard: int, replica: int) -> Recorder | None:
    if not config.get("events"):
        return None
    path = server_events_file(Path(config["events"]), shard, replica)
    path.unlink(missing_ok=True)  # A file being read must not shrink.
    recorder = Recorder(path, shard)
    RECORDER.set(recorder)
    return recorder


def account(shard: int, machine: ServerMachine, endpoint: Endpoint[Any]) -> dict[str, Any]:
    """A shard's figures for the result, as plain data."""
    return {
        "shard": shard,
        "served_by": machine.name,
        "epoch": machine.view.epoch,
        "version": machine.shard.version,
        "clock": machine.shard.minimum,
        "pushes": dict(machine.shard.counts),
        "staleness": {str(steps): count for steps, count in sorted(machine.shard.staleness.items())},
        "links": {
            peer: {"sent": traffic.bytes_sent, "received": traffic.bytes_received, "lent": traffic.bytes_lent}
            for peer, traffic in endpoint.traffic.items()
        },
        "refused_frames": endpoint.refused,
        "refusals": [refusal._asdict() for refusal in machine.admission.refusals],
    }

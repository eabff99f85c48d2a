"""Brings the events of machines with clocks of their own to one clock, the launcher's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from offbeat.monitor.history import ServerStamps, Stamps, history_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.clock_offset import ClockOffset, Transfer, offsets
from offbeat.protocols.causality.histories import Computation
from offbeat.protocols.machine import Name
from offbeat.runtime.events.machines import MachineRecord
from offbeat.runtime.events.recorder import Stamp


def aligned(
    stamps: Stamps, servers: ServerStamps, machines: Sequence[MachineRecord]
) -> tuple[Stamps, ServerStamps, list[MachineRecord]]:
    """The events by the launcher's clock, and the machines with what their events say of their clocks.

    What the links have shown comes first. Then no effect may come before its cause: that narrows the offsets, and takes
    no drawn arrow back in time. Machines that read the launcher's clock stay as they are.
    """
    if all(machine.comparable for machine in machines):
        return stamps, servers, list(machines)
    homes = {name: number for number, machine in enumerate(machines, 1) for name in machine.processes}
    known = [ClockOffset(0.0, 0.0), *(_known(machine) for machine in machines)]
    tolerance = sum(offset.error for offset in known if offset.error < float("inf")) + 1e-3
    run = history_of(*_shifted(stamps, servers, homes, known), tolerance=tolerance)
    # What is left after the first shift is around zero, as wrong as the links said.
    rest = [ClockOffset(0.0, offset.error) for offset in known]
    residual = offsets(len(known), transfers(run, homes), rest)
    found = [ClockOffset(one.seconds + more.seconds, more.error) for one, more in zip(known, residual, strict=True)]
    records = [
        structs.replace(machine, offset=offset.seconds, error=offset.error if offset.error < float("inf") else None)
        for machine, offset in zip(machines, found[1:], strict=True)
    ]
    return *_shifted(stamps, servers, homes, found), records


def _known(machine: MachineRecord) -> ClockOffset:
    return ClockOffset(0.0, 0.0) if machine.comparable else machine.known_offset


def _shifted(
    stamps: Stamps, servers: ServerStamps, homes: Mapping[Name, int], known: Sequence[ClockOffset]
) -> tuple[Stamps, ServerStamps]:
    def moved(name: Name, own: Sequence[Stamp]) -> Sequence[Stamp]:
        ahead = known[homes.get(name, 0)].seconds
        return [structs.replace(stamp, time=stamp.time - ahead) for stamp in own] if ahead else own

    workers = {rank: moved(worker_name(rank), own) for rank, own in stamps.items()}
    return workers, {name: moved(name, own) for name, own in servers.items()}


def transfers(run: Computation, homes: Mapping[Name, int]) -> Iterator[Transfer]:
    """What passed between machines, by their numbers: of a collective, the last cause and the first effect of each."""
    numbers = [homes.get(name, 0) for name in run.processes]
    for join in run.joins:
        sent, received = dict[int, float](), dict[int, float]()
        for cause in join.causes:
            number, time = numbers[cause.process], run.event(cause).time
            sent[number] = max(time, sent.get(number, time))
        for effect in join.effects:
            number, time = numbers[effect.process], run.event(effect).time
            received[number] = min(time, received.get(number, time))
        for source, start in sent.items():
            for target, stop in received.items():
                if source != target:
                    yield Transfer(source, target, start, stop)


def lane_notes(names: Sequence[Name], machines: Sequence[MachineRecord]) -> tuple[str, ...]:
    """Of each process, its machine and how its clock was brought to the launcher's; empty if all are on one machine."""
    notes: dict[Any, str] = {}
    for machine in machines:
        clock = "" if machine.comparable else f", clock {machine.known_offset}"
        notes |= dict.fromkeys(machine.processes, f"{machine.name}{clock}")
    return tuple(notes.get(name, "") for name in names) if notes else ()

"""A schedule and a machine as people would write their own."""

from __future__ import annotations

STAR = """\
import numpy as np
from offbeat.protocols.collectives import Algorithm, Collective
from offbeat.protocols.schedule import Op, entries

def my_star(view, layout):
    others = np.arange(1, view.size)
    up = entries(Op.SEND, others, 0, 0, layout.count, ())
    yield up
    yield up.used(Op.REDUCE, (0,))
    down = entries(Op.SEND, 0, others, 0, layout.count, (1,))
    yield down
    yield down.used(Op.COPY, (2,))

def gathered(view, layout):
    everybody, cuts = np.arange(view.size), layout.blocks(view.size)
    source, target = (side.ravel() for side in np.meshgrid(everybody, everybody))
    other = source != target
    source, target = source[other], target[other]
    brought = entries(Op.SEND, source, target, cuts[source], cuts[source + 1], ())
    yield brought
    yield brought.used(Op.COPY, (0,))

FETCHED = Algorithm("fetched", Collective.BROADCAST, lambda view, layout: iter([
    entries(Op.FETCH, layout.root, np.setdiff1d(np.arange(view.size), layout.root), 0, layout.count, ()),
    entries(Op.COPY, layout.root, np.setdiff1d(np.arange(view.size), layout.root), 0, layout.count, (0,)),
]), "all read the root's memory")
NUMBER = 3
"""


COURIER = """\
from msgspec import Struct
from offbeat.protocols.machine import Received, Send, SetTimer, Timer
from offbeat.testing import MachineContract

class Parcel(Struct, frozen=True):
    number: int

class Thanks(Struct, frozen=True):
    number: int

class Courier:
    name = "courier"
    def __init__(self, to): self.missing = {(name, number) for name in to for number in range(3)}
    def begin(self, now): return self.again()
    def again(self): return [*(Send(to, Parcel(n)) for to, n in sorted(self.missing)), SetTimer(0.3, "again")]
    def on(self, event, now):
        if isinstance(event, Timer):
            return self.again() if self.missing else []
        if isinstance(event, Received) and isinstance(event.message, Thanks):
            self.missing.discard((event.sender, event.message.number))
        return []

class House:
    def __init__(self, name): self.name, self.got = name, []
    def begin(self, now): return []
    def on(self, event, now):
        if isinstance(event, Received):
            if event.message.number not in self.got:  # once
                self.got.append(event.message.number)
            return [Send(event.sender, Thanks(event.message.number))]
        return []

class Deliveries(MachineContract):
    survives = ("delay", "reorder", "loss", "duplicate", "stop", "partition")

    def machines(self, size, seed):
        houses = [House(f"house {n}") for n in range(size)]
        return [Courier([house.name for house in houses]), *houses]

    def invariant(self, machines):
        for machine in machines.values():
            if isinstance(machine, House) and len(set(machine.got)) < len(machine.got):
                return f"{machine.name} has {machine.got}: a parcel twice"

    def done(self, machines):
        return not machines["courier"].missing

class Alone(House):
    @staticmethod
    def machines(size, seed): return [Alone(f"alone {n}") for n in range(size)]
    @staticmethod
    def invariant(machines): return None
    @staticmethod
    def done(machines): return True
"""

"""User-defined machines under random faults: the invariant always holds, and once faults cease they get done.

A contract gives the machines, what must always hold (`invariant`) and what must come about (`done`). Everything in one
run, faults included, follows from one seed, so that a failure can be reproduced.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, ClassVar, Final

from msgspec import Struct

from offbeat.errors import MachineError, UsageError, did_you_mean
from offbeat.protocols.machine import Done, Ended, Machine, Name, Received, Timer
from offbeat.simulate.machines import Fault, Happening, Kill, LossyNetwork, Partition, Sent, Simulation, Stop

FAULTS: Final = ("delay", "reorder", "loss", "duplicate", "stop", "partition", "kill")
"""Messages are slow, reordered, lost or duplicated; processes stop, are partitioned, are killed."""
SHOWN: Final = 25  # Events that an error lists.


class MachineContract:
    """What must hold for machines that run together; subclass it, and give it to `offbeat check`."""

    survives: ClassVar[Sequence[str]] = FAULTS  # The faults that it must hold under.
    sizes: ClassVar[Sequence[int]] = (2, 3, 5)  # Number of machines: one of these, by the seed.
    calm: ClassVar[float] = 10.0  # Virtual seconds after which no more faults happen.
    patience: ClassVar[float] = 120.0  # Virtual seconds by which it must be done.
    observer: ClassVar[Name] = "coordinator"
    """The machine that gets `Ended` when a process was killed, if there is one."""

    def machines(self, size: int, seed: int) -> Sequence[Machine]:
        """New machines, each with a unique name; randomness must come from the seed."""
        raise NotImplementedError

    def invariant(self, machines: Mapping[Name, Machine]) -> str | None:
        """What is wrong, in words; None if nothing is. Called after every event with all machines, dead ones too."""
        raise NotImplementedError

    def done(self, machines: Mapping[Name, Machine]) -> bool:
        """Whether they have achieved their purpose; called with the live machines."""
        raise NotImplementedError

    def kills(self, size: int) -> int:
        """How many of `size` machines may be killed: fewer than half."""
        return (size - 1) // 2

    def victims(self, names: Sequence[Name]) -> Sequence[Name]:
        """Which of these machines may be killed: all, unless some are part of what runs them."""
        return names

    def perform(self, name: Name, work: Any) -> Any:  # noqa: ARG002
        """Do the work of a machine's `Start`, and return the result of the `Done`."""
        return None


class Weather(Struct, frozen=True):
    """The faults of one run."""

    network: LossyNetwork
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, contract: MachineContract, names: Sequence[Name], seed: int) -> Weather:
        """The faults of a seed: none with seed 0, and a random choice with others."""
        chance = Random(seed * 2_654_435_761 + 1)  # noqa: S311 - faults to be repeated, not secrets
        kinds = {kind for kind in contract.survives if seed and chance.random() < 0.5}
        until = contract.calm
        network = LossyNetwork(
            delay=chance.uniform(0.001, 0.2) if "delay" in kinds else 0.001,
            jitter=chance.uniform(0.005, 0.3) if "reorder" in kinds else 0.0,
            loss=chance.uniform(0.02, 0.3) if "loss" in kinds else 0.0,
            duplicate=chance.uniform(0.02, 0.3) if "duplicate" in kinds else 0.0,
            ordered="reorder" not in contract.survives,
            until=until,
        )
        faults: list[Fault] = [
            Stop(chance.choice(names), chance.uniform(0, until), chance.uniform(0.1, until / 4))
            for _ in range(chance.randint(1, 3) if "stop" in kinds else 0)
        ]
        for _ in range(chance.randint(1, 2) if "partition" in kinds and len(names) > 1 else 0):
            cut = frozenset(chance.sample(names, chance.randint(1, len(names) - 1)))
            at = chance.uniform(0, 0.75 * until)
            faults.append(Partition(cut, at, chance.uniform(0.1, until - at)))
        victims = contract.victims(names)
        for name in chance.sample(victims, contract.kills(len(victims))) if "kill" in kinds else ():
            seen = chance.choice([None, chance.uniform(0.01, 1.0)])
            faults.append(Kill(name, chance.uniform(0, until), seen))
        return cls(network, tuple(faults))

    def words(self) -> str:
        """All faults, for an error."""
        network = self.network
        words = [f"messages take {network.delay:.3g} s"]
        if network.jitter:
            words[0] += f" and {network.jitter:.3g} s more on average"
        fates = ((network.loss, "are lost"), (network.duplicate, "come twice"))
        words += [f"{share:.0%} of them {fate}" for share, fate in fates if share]
        return "; ".join([*words, *(_fault_in_words(fault) for fault in self.faults)])


class MachineReport(Struct, frozen=True):
    """What was tried without a failure."""

    runs: int
    events: int  # Events handled in all runs.
    lost: int  # Lost messages.
    faults: Mapping[str, int]  # Number of runs with each kind.


@dataclass
class _FaultyRun:
    """One run, by one seed."""

    contract: MachineContract
    name: str
    seed: int
    recent: deque[Happening] = field(default_factory=lambda: deque[Happening](maxlen=SHOWN))

    def __post_init__(self) -> None:
        contract = self.contract
        size = contract.sizes[self.seed % len(contract.sizes)]
        machines = _made(contract, self.name, size, self.seed)
        self.names = [machine.name for machine in machines]
        self.weather = Weather.of(contract, self.names, self.seed)
        work = {name: partial(contract.perform, name) for name in self.names}
        self.simulation = Simulation(
            machines,
            seed=self.seed,
            network=self.weather.network,
            faults=self.weather.faults,
            perform=work,
            observer=contract.observer,
            log=self.recent.append,
        )

    def run(self) -> None:
        """Run until it is done and all faults are over; a MachineError if it breaks, or never gets done."""
        try:
            # With no events left, a fault that is still to come can do no harm.
            done = self.simulation.run(self.contract.patience, self._holds_and_is_over) or self._is_done()
        except MachineError:
            raise
        except Exception as error:
            raise self._broken(f"raises {type(error).__name__}: {error}", "") from error
        if not done:
            why = f"{self.contract.calm:g} s were left without any fault" if self.weather.faults else "nothing failed"
            raise self._broken(f"is not done after {self.simulation.now:.3g} s of virtual time", why)

    def _holds_and_is_over(self) -> bool:
        """Whether it is done and all faults have struck; a MachineError if the invariant does not hold."""
        try:
            wrong = self.contract.invariant(self._machines())
        except AssertionError as error:
            wrong = str(error) or "an assertion in invariant() fails"
        if wrong:
            raise self._broken("breaks its invariant", str(wrong))
        last_fault = max((fault.at for fault in self.weather.faults), default=0.0)
        return self.simulation.now >= last_fault and self._is_done()

    def _is_done(self) -> bool:
        return bool(self.contract.done({n: m for n, m in self._machines().items() if self.simulation.alive(n)}))

    def _machines(self) -> dict[Name, Machine]:
        return {name: self.simulation.machine(name) for name in self.names}

    def _broken(self, what: str, why: str) -> MachineError:
        lines = [
            f"{self.name} {what} with seed {self.seed} and {len(self.names)} machines"
            + (f": {why}" if why else "")
            + ".",
            f"It was event {self.simulation.events}, at {self.simulation.now:.4f} s of virtual time. What came before:",
            *(f"  {line}" for line in map(happening_in_words, self.recent)),
            f"The faults of this seed: {self.weather.words()}.",
            f"Run it again with `offbeat check {self.name} --seed {self.seed}`. If it need not survive such faults, "
            f"say so: `survives = (...)` in the contract.",
        ]
        return MachineError("\n".join(lines), seed=self.seed)


def check_machine(
    contract: MachineContract,
    runs: int = 200,
    seed: int | None = None,
    *,
    name: str | None = None,
    progress: Callable[[float], None] | None = None,
) -> MachineReport:
    """Put machines through random faults: `runs` times, or once with one seed.

    Args:
        contract: The machines, what must always hold, and what must come about.
        runs: Number of seeds to try, from 0 on.
        seed: Only this one, to reproduce a failure.
        name: Its name in errors.
        progress: Called with the share that is done.

    Raises:
        MachineError: the invariant broke, or it never got done; names the seed and the last events.

    """
    _check_form(contract)
    seeds: Iterable[int] = range(runs) if seed is None else [seed]
    events = lost = 0
    counts: Counter[str] = Counter()
    for number, each in enumerate(seeds):
        played = _FaultyRun(contract, name or type(contract).__name__, each)
        played.run()
        events, lost = events + played.simulation.events, lost + played.simulation.lost
        counts.update(_kinds(played.weather))
        if progress is not None:
            progress((number + 1) / runs)
    return MachineReport(runs if seed is None else 1, events, lost, dict(counts))


def _check_form(contract: MachineContract) -> None:
    for kind in contract.survives:
        if kind not in FAULTS:
            raise UsageError(f"survives names {kind!r}, which is not a fault.{did_you_mean(kind, FAULTS)}")
    if not contract.sizes or min(contract.sizes) < 1:
        raise UsageError(f"sizes is {tuple(contract.sizes)}: give one number of machines or more, each above 0.")


def _made(contract: MachineContract, name: str, size: int, seed: int) -> list[Machine]:
    machines = list(contract.machines(size, seed))
    for machine in machines:
        missing = [method for method in ("name", "begin", "on") if not hasattr(machine, method)]
        if missing:
            raise UsageError(
                f"{name}: {type(machine).__name__} is not a machine, as it has no {', '.join(missing)}. A machine has "
                f"a name, begin(now) and on(event, now); see docs/strategies.md."
            )
    names = [machine.name for machine in machines]
    if not machines or len(set(names)) < len(names):
        raise UsageError(f"{name}: machines() made {names or 'none'}: give each machine a unique name.")
    return machines


def _kinds(weather: Weather) -> list[str]:
    network = weather.network
    kinds = ["delay"] * (network.delay > 0.001) + ["reorder"] * (network.jitter > 0)
    kinds += ["loss"] * (network.loss > 0) + ["duplicate"] * (network.duplicate > 0)
    return kinds + sorted({type(fault).__name__.lower() for fault in weather.faults})


def _fault_in_words(fault: Fault) -> str:
    match fault:
        case Kill(name, at, _):
            return f"{name} is killed at {at:.3g} s"
        case Stop(name, at, seconds):
            return f"{name} is stopped at {at:.3g} s for {seconds:.3g} s"
        case Partition(names, at, seconds):
            return f"{', '.join(sorted(names))} cut off at {at:.3g} s for {seconds:.3g} s"
        case _:
            return str(fault)


def happening_in_words(happening: Happening) -> str:
    """One line about an event, with its time."""
    if isinstance(happening, Sent):
        arrival = ", ".join(f"{at:.4f} s" for at in happening.arrivals)
        fate = f"arrives at {arrival}" if arrival else "is lost"
        return f"{happening.at:.4f} s  {happening.sender} sends {happening.message} to {happening.to}: {fate}"
    match happening.event:
        case None:
            what = "begins"
        case Received(sender, message):
            what = f"receives {message} from {sender}"
        case Timer(token):
            what = f"is told that its timer {token!r} has rung"
        case Done(token, result):
            what = f"is told that its work {token!r} is done" + ("" if result is None else f": {result}")
        case Ended(name):
            what = f"is told that {name} has ended"
    return f"{happening.at:.4f} s  {happening.name} {what}"

"""Injected faults, written as sentences (`FORMS`): which process is disturbed, how, and when.

What fires in which step depends on the seed, the role, the rank and the step alone: the same seed gives the same
faults, on real processes and in the simulator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import UsageError
from offbeat.limits import SECONDS
from offbeat.protocols.partition import mixed

DATA_SERVER: Final = "data server"
ROLES = ("worker", "server", "client", DATA_SERVER, "coordinator")
"""Roles that can be disturbed; clients are those of federated learning, and the coordinator is Sandblaster's."""
FORMS = (
    "worker 1: pause 200ms every 1s",
    "any worker: pause 200ms with probability 0.15",
    "worker 2: kill at step 50",
    "server 0: stop 5s at step 50",
    "worker *: pace 40ms",
    "client 7: poison(sign, 10)",
    "data server 0: kill at step 20",
)
"""One example of each form; every error shows them."""
BLOCK = 1024  # Steps whose chances are drawn together.
POISONS: Final = ("sign", "noise", "labels")
"""How a client attacks: with its update reversed, with noise, or by training on wrong labels."""
FACTOR: Final = 10.0
"""By how much a poisoned update is scaled unless the sentence says it."""
LARGEST_FACTOR: Final = 1e6

Value = TypeVar("Value")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(us|ms|s)")


class AtStep(Struct, frozen=True):
    """Once, when `step` steps are finished and the next begins."""

    step: int


class Every(Struct, frozen=True):
    """Again and again, by the clock; the period contains the pause."""

    seconds: float


class Chance(Struct, frozen=True):
    """In each step independently, with this probability."""

    probability: float


class KillFault(Struct, frozen=True):
    """The process ends at once, by SIGKILL."""

    when: AtStep


class Pause(Struct, frozen=True):
    """The process does nothing for some seconds: SIGSTOP, then SIGCONT."""

    seconds: float
    when: AtStep | Every | Chance


class PaceFault(Struct, frozen=True):
    """Every step takes at least `seconds`, as if computing took longer."""

    seconds: float


class Poison(Struct, frozen=True):
    """A client attacks the model in the rounds that it takes part in: in all, or with a probability."""

    kind: str  # Of `POISONS`.
    factor: float = FACTOR  # What a reversed update is multiplied by, or how long noise is beside an honest update.
    when: Chance | None = None  # In each round independently; None: in every one.

    def strikes(self, chance: float) -> bool:
        """Whether it attacks in a round, from a uniform random number."""
        return self.when is None or chance < self.when.probability


Action = KillFault | Pause | PaceFault | Poison


class Disturbance(Struct, frozen=True):
    """One parsed sentence."""

    text: str  # The sentence as written.
    role: str  # Of `ROLES`.
    rank: int | None  # Which of them; None: all.
    action: Action  # What happens to it.


def check(disturbances: Sequence[Disturbance], cast: Mapping[str, int]) -> None:
    """Refuse faults of processes that the run will not have; `cast` has the number of each role."""
    for one in disturbances:
        count = cast.get(one.role, 0)
        if count == 0:
            raise UsageError(
                f"--disturb {one.text!r}: this run has no {one.role}s, so nothing could be disturbed. Choose a "
                f"strategy that has some (data servers: --data-servers), or leave the sentence out."
            )
        if one.rank is not None and one.rank >= count:
            known = f"only {one.role} 0" if count == 1 else f"{one.role}s 0 to {count - 1}"
            raise UsageError(f"--disturb {one.text!r}: there is no {one.role} {one.rank} in this run, {known}.")


def asked(disturbances: Sequence[Disturbance], cast: Mapping[str, int]) -> int:
    """Number of requested faults: a sentence counts once for each process that it applies to.

    So all one-time faults have happened when this many have fired. A poison fires again with each poisoned update.
    """
    return sum(1 if one.rank is not None else cast.get(one.role, 0) for one in disturbances)


@dataclass
class FaultPlan:
    """All faults of one process."""

    disturbances: Sequence[Disturbance]  # All sentences of the run, in their order: a sentence is known by its number.
    role: str
    rank: int
    seed: int
    _drawn: dict[int, tuple[int, NDArray[np.float64]]] = field(
        default_factory=dict[int, tuple[int, NDArray[np.float64]]]
    )

    def __post_init__(self) -> None:
        self._mine = [
            (number, one.action)
            for number, one in enumerate(self.disturbances)
            if one.role == self.role and one.rank in (None, self.rank)
        ]

    def __bool__(self) -> bool:
        """Whether it has any faults."""
        return bool(self._mine)

    def at(self, step: int) -> list[tuple[int, KillFault | Pause]]:
        """What fires when this step begins, with the numbers of the sentences."""
        return [
            (number, action)
            for number, action in self._mine
            if not isinstance(action, PaceFault | Poison) and self._strikes(number, action.when, step)
        ]

    @property
    def timed(self) -> list[tuple[int, float, float]]:
        """What fires by the clock: the sentence's number, seconds of a pause, seconds from one to the next."""
        return [
            (number, action.seconds, action.when.seconds)
            for number, action in self._mine
            if isinstance(action, Pause) and isinstance(action.when, Every)
        ]

    @property
    def pace(self) -> float:
        """Seconds that each step takes at least; of several the longest."""
        return max((action.seconds for _, action in self._mine if isinstance(action, PaceFault)), default=0.0)

    @property
    def paces(self) -> list[int]:
        """The numbers of the sentences that set the pace."""
        return [number for number, action in self._mine if isinstance(action, PaceFault)]

    @property
    def pauses(self) -> bool:
        """Whether the process will be paused, so that another must continue it."""
        return any(isinstance(action, Pause) for _, action in self._mine)

    def _strikes(self, number: int, when: AtStep | Every | Chance, step: int) -> bool:
        if isinstance(when, AtStep):
            return step == when.step
        return isinstance(when, Chance) and bool(self._chance(number, step) < when.probability)

    def _chance(self, number: int, step: int) -> float:
        block, place = divmod(step, BLOCK)
        kept = self._drawn.get(number)
        if kept is None or kept[0] != block:
            kept = self._drawn[number] = block, chances(self.seed, self.role, self.rank, number, block)
        return float(kept[1][place])


def chances(seed: int, role: str, rank: int, number: int, block: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each of a block of steps: what is below a sentence's probability fires."""
    return np.random.default_rng(mixed(seed, ROLES.index(role), rank, number, block)).random(BLOCK)


def parse(text: str) -> Disturbance:
    """Parse one sentence; an error names the offending word."""
    return _Sentence(text).read()


class _Sentence:
    def __init__(self, text: str) -> None:
        self._text = text
        spaced = re.sub(r"([0-9])\s+(us|ms|s)\b", r"\1\2", re.sub(r"([:(),])", r" \1 ", text.lower()))
        self._words = spaced.split()
        if self._words[:2] == DATA_SERVER.split():  # The only name of two words.
            self._words[:2] = [DATA_SERVER]
        elif self._words[:3] == ["any", *DATA_SERVER.split()]:
            self._words[1:3] = [DATA_SERVER]
        self._next = 0

    def read(self) -> Disturbance:
        role, rank, anyone = self._who()
        self._expect(":")
        action = self._action()
        if self._next < len(self._words):
            self._refuse("the end of the sentence")
        when = None if isinstance(action, PaceFault) else action.when
        if isinstance(action, Poison) != (role == "client"):
            self._fail(
                "poison is for clients" if role != "client" else "a client is not a process, so it can only poison"
            )
        if isinstance(action, Poison) and when is not None and not anyone:
            self._fail("a probability is for 'any client'")
        if anyone and not isinstance(when, Chance):
            self._fail(f"'any {role}' is for what happens with a probability. Say which ({role} 0), or all ({role} *)")
        if isinstance(action, PaceFault) and role != "worker":
            self._fail(f"a {role} computes no steps, so it has no pace. Pause it instead")
        return Disturbance(self._text.strip(), role, rank, action)

    def _who(self) -> tuple[str, int | None, bool]:
        anyone = self._take_if("any")
        role = self._one_of(*ROLES) if anyone else self._one_of(*ROLES, "any")
        if anyone or self._take_if("*"):
            return role, None, anyone
        return role, self._whole(f"the {role}'s number, or * for each"), False

    def _action(self) -> Action:
        verb = self._one_of("kill", "pause", "stop", "pace", "poison")
        if verb == "kill":
            return KillFault(self._at_step())
        if verb == "poison":
            return self._poison()
        seconds = self._seconds()
        return PaceFault(seconds) if verb == "pace" else Pause(seconds, self._when(seconds))

    def _poison(self) -> Poison:
        kind, factor = POISONS[0], FACTOR
        if self._take_if("("):
            kind = self._one_of(*POISONS)
            if kind != "labels" and self._take_if(","):
                factor = self._factor()
            self._expect(")")
        if not self._take_if("with"):
            return Poison(kind, factor)
        self._expect("probability")
        return Poison(kind, factor, Chance(self._probability()))

    def _factor(self) -> float:
        factor = self._number()
        wanted = f"a factor above 0 and up to {LARGEST_FACTOR:g}"
        return self._take(0 < factor <= LARGEST_FACTOR, factor, wanted)

    def _when(self, pause: float) -> AtStep | Every | Chance:
        if self._word() == "at":
            return self._at_step()
        if self._one_of("every", "with", "at") == "with":
            self._expect("probability")
            return Chance(self._probability())
        period = self._seconds()
        if period <= pause:
            self._fail(f"{self._words[self._next - 1]!r} is not longer than the pause: no time would be left to work")
        return Every(period)

    def _at_step(self) -> AtStep:
        self._expect("at")
        self._expect("step")
        return AtStep(self._whole("the number of steps that are finished then"))

    def _seconds(self) -> float:
        found = _DURATION.fullmatch(self._word())
        seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
        return self._take(
            0 < seconds <= SECONDS, seconds, "a time above 0 and up to a year, with its unit, such as 200ms or 5s"
        )

    def _number(self) -> float:
        try:
            return float(self._word())
        except ValueError:
            return math.nan

    def _probability(self) -> float:
        value = self._number()
        return self._take(0 <= value <= 1, value, "a probability from 0 to 1")

    def _whole(self, what: str) -> int:
        is_whole = re.fullmatch(r"[0-9]{1,15}", self._word()) is not None
        return self._take(is_whole, int(self._word()) if is_whole else 0, what)

    def _word(self) -> str:
        """The next word; empty at the end."""
        return self._words[self._next] if self._next < len(self._words) else ""

    def _take_if(self, word: str) -> bool:
        taken = self._word() == word
        self._next += taken
        return taken

    def _expect(self, word: str) -> None:
        self._take(self._word() == word, word, repr(word))

    def _one_of(self, *words: str) -> str:
        return self._take(self._word() in words, self._word(), f"{', '.join(words[:-1])} or {words[-1]}")

    def _take(self, right: bool, value: Value, wanted: str) -> Value:
        """Go on to the next word, and return what this one means; an error says what should come here."""
        if not right:
            self._refuse(wanted)
        self._next += 1
        return value

    def _refuse(self, wanted: str) -> NoReturn:
        word = self._word()
        what = f"{word!r} is not understood" if word else "the sentence ends too early"
        self._fail(f"{what}; what should come here is {wanted}")

    def _fail(self, why: str) -> NoReturn:
        raise UsageError(f"--disturb {self._text!r}: {why}. Forms: {'; '.join(FORMS)}.")

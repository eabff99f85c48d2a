"""Findings on federated rounds: which client, phase or link each waited for, and what other settings would change.

From the times in `rounds.jsonl`. What would have been is replayed with the rule by which simulated rounds close.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np

from offbeat.protocols.federated.plan import RoundPlan, round_failure
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.runtime.run.folder import strategy_of
from offbeat.simulate.federated import RoundClosing, close
from offbeat.strategies import combined, parse
from offbeat.strategies.federated.strategy import Federated

PHASES: Final = ("download", "training", "upload")
WORST: Final = 10
"""Rounds and clients that are listed in words."""
DEADLINES: Final = (0.5, 0.75, 0.9)
"""Shares of the updates that would have come before the deadlines that are tried."""
_PROMPT: Final = 0.05
"""Seconds within which a round of real clients ends after the update that ends it."""
KEPT: Final = (0.9, 0.8)
"""Shares of the selected clients that rounds are tried with, as if the others were selected in excess."""


class WaitedFor(msgspec.Struct, frozen=True):
    """What one round waited for."""

    number: int
    seconds: float  # How long the round took.
    client: int | None  # Who came last, or disappeared; None: the deadline, patience, or nobody was selected.
    phase: str  # Where it lost most against the median; `silence`, `deadline`, `patience`, `nobody` or `unknown`.
    alone: float  # Seconds for which the round waited for this client only; for the deadline, after the last update.
    took: float | None  # Seconds of the client in this phase.
    usual: float | None  # The median of the round's clients.


class ClientBlame(msgspec.Struct):
    """What one client cost the rounds."""

    client: int
    last: int = 0  # Rounds that waited for it.
    alone: float = 0.0  # Seconds that they waited for it only.
    phases: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    late: int = 0
    dropped: int = 0


class WhatIf(msgspec.Struct, frozen=True):
    """The rounds replayed under other settings."""

    setting: str
    seconds: float  # Of all rounds together.
    updates: int
    late: int
    failed: int  # Rounds without an update of the model.


class RoundsExplained(msgspec.Struct, frozen=True):
    """The findings on the rounds of a run."""

    rounds: tuple[WaitedFor, ...]
    clients: tuple[ClientBlame, ...]  # The worst first.
    what_if: tuple[WhatIf, ...]  # The first one is what was; empty if it cannot be replayed.
    totals: dict[str, float]
    note: str  # Why nothing was replayed; or empty.

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return msgspec.to_builtins(self)

    @property
    def lines(self) -> list[str]:
        """All of it in words."""
        return [*_totals_in_words(self), *_rounds_in_words(self), *_clients_in_words(self), *_replays_in_words(self)]


def explained_rounds(folder: Path, record: Mapping[str, Any]) -> RoundsExplained | None:
    """The findings for a run, from its folder and run.json; None if it has no federated rounds."""
    entries = read_rounds(folder)
    strategy = strategy_of(dict(record))
    if not entries or not strategy:
        return None
    exchange = combined(parse(strategy)).exchange
    if not isinstance(exchange, Federated):
        return None
    plan = exchange.plan()
    rounds = [_Round.of(entry) for entry in entries]
    synchronous = plan.buffer is None
    waited = tuple(each.waited_for(plan) if synchronous else each.slowest() for each in rounds)
    replays, note = _replays(rounds, plan) if synchronous else ((), _ASYNCHRONOUS)
    names = ("updates", "late", "dropped", "refused")
    totals = {name: float(sum(each.counts[name] for each in rounds)) for name in names}
    seconds = sum(each.ended - each.started for each in rounds)
    return RoundsExplained(waited, _blame(rounds, waited), replays, {**totals, "seconds": seconds}, note)


_ASYNCHRONOUS: Final = (
    "an asynchronous server waits for nobody in particular, and with another deadline it would have asked other "
    "clients: run it again to see"
)


class _Round(msgspec.Struct, frozen=True):
    """One round of the log: a row of times for each client of the cohort, infinite where they are not known."""

    number: int
    started: float
    ended: float
    cohort: tuple[int, ...]
    times: Any  # Rows: asked, downloaded, trained, uploaded, lost.
    late: tuple[int, ...]
    dropped: tuple[int, ...]
    counts: dict[str, int]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Round:
        """From a line of the log, which has null for infinite times."""
        names = ("asked", "downloaded", "trained", "uploaded", "lost")
        rows = [[math.inf if row.get(name) is None else row[name] for name in names] for row in entry["times"]]
        late, dropped = tuple(entry["late"]), tuple(entry["dropped"])
        counts = {"late": len(late), "dropped": len(dropped)}
        counts |= {name: int(entry.get(name) or 0) for name in ("updates", "refused")}
        return cls(
            int(entry["number"]),
            float(entry["started"]),
            float(entry["ended"]),
            tuple(entry["cohort"]),
            np.array(rows, np.float64).reshape(len(rows), len(names)),
            late,
            dropped,
            counts,
        )

    def closing(self, plan: RoundPlan, clients: int | None = None) -> RoundClosing:
        """When it would have closed under a plan, with the first so many clients of its cohort."""
        times = self.times[:clients]
        return close(plan, self.started, times[:, 3], times[:, 4])

    def waited_for(self, plan: RoundPlan) -> WaitedFor:
        """What it waited for."""
        seconds = self.ended - self.started
        if not self.cohort:
            return WaitedFor(self.number, 0.0, None, "nobody", 0.0, None, None)
        closing = self.closing(plan)
        known = math.isclose(closing.ended, self.ended, rel_tol=1e-6, abs_tol=1e-6)
        last = closing.last if known else self._last_to_come(plan)
        before = [float(self.times[place, 3]) for place in closing.came if place != last]
        alone = self.ended - max((at for at in before if at <= self.ended), default=self.started)
        if last is None:
            phase = "patience" if plan.deadline is None else "deadline"
            return WaitedFor(self.number, seconds, None, phase, alone, None, None)
        if math.isfinite(self.times[last, 4]):
            return WaitedFor(self.number, seconds, self.cohort[last], "silence", alone, None, None)
        return WaitedFor(self.number, seconds, self.cohort[last], *self._phase(last, alone))

    def slowest(self) -> WaitedFor:
        """Of an asynchronous server's step: the client whose update took longest."""
        takes = np.where(np.isfinite(self.times[:, 3]), self.times[:, 3] - self.times[:, 0], -math.inf)
        seconds = self.ended - self.started
        if not len(takes) or math.isinf(float(takes.max())):
            return WaitedFor(self.number, seconds, None, "nobody", 0.0, None, None)
        place = int(np.argmax(takes))
        return WaitedFor(self.number, seconds, self.cohort[place], *self._phase(place, 0.0))

    def _last_to_come(self, plan: RoundPlan) -> int | None:
        """Of rounds of real clients, which do not end to the microsecond as the rule says; None: the end of waiting."""
        if self.late and plan.deadline is not None and self.ended - self.started >= plan.deadline:
            return None
        # Who was given up holds a round up until then; who was refused, or came to an earlier process, has no time.
        until = np.where(np.isfinite(self.times[:, 4]), self.times[:, 4], self.times[:, 3])
        places = np.flatnonzero(until <= self.ended).tolist()
        last = max(places, key=lambda place: float(until[place]), default=None)
        impatient = self.late and plan.deadline is None and last is not None and until[last] < self.ended - _PROMPT
        return None if impatient else last

    def _phase(self, place: int, alone: float) -> tuple[str, float, float | None, float | None]:
        """In which phase a client lost most time against the median of the round; how long it took, and the median."""
        with np.errstate(invalid="ignore"):
            takes = np.diff(self.times[:, :4], axis=1)
        own = takes[place]
        if not np.isfinite(own).all():  # Of real clients the server sees only when updates arrive.
            return "unknown", alone, None, None
        usual = [float(median(takes[np.isfinite(takes[:, phase]), phase])) for phase in range(len(PHASES))]
        worst = int(np.argmax(own - usual)) if len(self.cohort) > 1 else int(np.argmax(own))
        return PHASES[worst], alone, float(own[worst]), usual[worst]


# -- over all rounds -------------------------------------------------------------------------------------------------


def _blame(rounds: Sequence[_Round], waited: Sequence[WaitedFor]) -> tuple[ClientBlame, ...]:
    """What each client cost; those that cost nothing are left out."""
    blamed: dict[int, ClientBlame] = {}

    def entry(client: int) -> ClientBlame:
        return blamed.setdefault(client, ClientBlame(client))

    for each, cause in zip(rounds, waited, strict=True):
        for client in each.late:
            entry(client).late += 1
        for client in each.dropped:
            entry(client).dropped += 1
        if cause.client is not None:
            one = entry(cause.client)
            one.last += 1
            one.alone += cause.alone
            one.phases[cause.phase] = one.phases.get(cause.phase, 0) + 1
    return tuple(sorted(blamed.values(), key=lambda one: (-one.alone, -one.late - one.dropped, one.client)))


def _replays(rounds: Sequence[_Round], plan: RoundPlan) -> tuple[tuple[WhatIf, ...], str]:
    """The rounds as they were, and with other deadlines and numbers of clients."""
    was = _replay("as it was", rounds, plan, math.inf)
    if was is None or not math.isclose(was.seconds, sum(each.ended - each.started for each in rounds), rel_tol=0.01):
        return (), "its clients were real: what they would have done under other settings is not in the log"
    takes = np.concatenate([each.times[:, 3] - each.started for each in rounds] or [np.zeros(0)])
    takes = takes[np.isfinite(takes)]
    tried: list[WhatIf | None] = [was]
    for share in DEADLINES if len(takes) else ():
        seconds = _rounded_up(float(np.quantile(takes, share)))
        changed = msgspec.structs.replace(plan, deadline=seconds)
        tried.append(_replay(f"deadline={seconds:g}", rounds, changed, math.inf))
    if plan.deadline is not None:
        tried.append(_replay("no deadline", rounds, msgspec.structs.replace(plan, deadline=None), math.inf))
    if plan.over > 1:
        tried.append(_replay("over=1", rounds, plan, plan.needed))
    elif not plan.poisson:
        for share in KEPT:
            needed = math.ceil(share * plan.needed)
            if plan.fewest <= needed < plan.needed:
                words = f"the first {needed:,} of {plan.needed:,} (over={plan.needed / needed:.2f})"
                changed = msgspec.structs.replace(plan, fraction=needed / plan.clients)
                tried.append(_replay(words, rounds, changed, math.inf))
    return tuple(each for each in tried if each is not None), ""


def _replay(setting: str, rounds: Sequence[_Round], plan: RoundPlan, most: float) -> WhatIf | None:
    """The rounds with the first clients of each cohort under a plan; None if their times do not tell."""
    seconds, updates, late, failed = 0.0, 0, 0, 0
    for each in rounds:
        count = int(min(len(each.cohort), most))
        closing = each.closing(plan, count)
        if math.isinf(closing.ended):
            return None
        lost = int(np.sum(each.times[:count, 4] <= closing.ended))
        came = len(closing.came)
        bad = bool(round_failure(plan, count, came))
        seconds += closing.ended - each.started
        updates += 0 if bad else came
        late += count - came - lost
        failed += bad
    return WhatIf(setting, seconds, updates, late, failed)


def _rounded_up(seconds: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1) if seconds > 0 else 1.0
    return float(f"{math.ceil(seconds / unit - 1e-9) * unit:.6g}")


# -- in words --------------------------------------------------------------------------------------------------------


def _totals_in_words(found: RoundsExplained) -> Iterator[str]:
    counts = ", ".join(f"{int(found.totals[name]):,} {name}" for name in ("late", "dropped", "refused"))
    yield (
        f"{len(found.rounds):,} rounds in {found.totals['seconds']:,.4g} s of the clients' time: "
        f"{int(found.totals['updates']):,} updates counted, {counts}."
    )
    causes = Counter(cause.phase for cause in found.rounds)
    causes.pop("nobody", None)
    words = {
        "download": "a download",
        "training": "a client's training",
        "upload": "an upload",
        "silence": "a client that had disappeared",
        "deadline": "the deadline",
        "patience": "patience to end",
        "unknown": "a client, in a phase that the server does not see",
    }
    if causes:
        listed = ", ".join(f"{words[phase]} in {count:,}" for phase, count in causes.most_common())
        yield f"Rounds waited longest for {listed}."


def _rounds_in_words(found: RoundsExplained) -> Iterator[str]:
    worst = sorted(found.rounds, key=lambda cause: (-cause.seconds, cause.number))[:WORST]
    yield "The longest rounds:" if len(found.rounds) > WORST else "Rounds, the longest first:"
    for cause in worst:
        yield f"  round {cause.number}, {cause.seconds:.4g} s: {_cause_in_words(cause)}"


def _cause_in_words(cause: WaitedFor) -> str:
    alone = f"{cause.alone:.3g} s for it alone"
    if cause.client is None:
        ends = {"deadline": "the deadline", "patience": "patience to end (--patience)"}
        if cause.phase not in ends:
            return "nobody was there to wait for"
        return f"waited for {ends[cause.phase]}, {cause.alone:.3g} s after the last update"
    match cause.phase:
        case "silence":
            return f"waited for client {cause.client}, which had disappeared, {alone}"
        case "unknown":
            return f"waited for client {cause.client}, {alone}"
        case _:
            took = f"{cause.took:.3g} s of {cause.phase}, median {cause.usual:.3g} s"
            return f"waited for client {cause.client} ({took})" + (f", {alone}" if cause.alone else "")


def _clients_in_words(found: RoundsExplained) -> Iterator[str]:
    if not found.clients:
        return
    yield f"Clients that cost most{_of_all(len(found.clients))}:"
    yield _row("client", "last in", "alone, s", "late", "dropped", "phase")
    for one in found.clients[:WORST]:
        where = ", ".join(f"{phase} {count:,}" for phase, count in Counter(one.phases).most_common())
        yield _row(f"{one.client}", f"{one.last:,}", f"{one.alone:.4g}", f"{one.late:,}", f"{one.dropped:,}", where)


def _of_all(count: int) -> str:
    return f" ({WORST} of {count:,})" if count > WORST else ""


def _replays_in_words(found: RoundsExplained) -> Iterator[str]:
    if found.note:
        yield f"Other settings were not tried: {found.note}."
        return
    width = max(len(each.setting) for each in found.what_if)

    def spell(setting: str, *cells: str) -> str:
        return f"  {setting:<{width}}" + "".join(f"{cell:>10}" for cell in cells)

    yield "The same rounds under other settings (fewer updates may mean more rounds):"
    yield spell("", "seconds", "updates", "late", "failed")
    for each in found.what_if:
        yield spell(each.setting, f"{each.seconds:,.4g}", f"{each.updates:,}", f"{each.late:,}", f"{each.failed:,}")


def _row(client: str, last: str, alone: str, late: str, dropped: str, where: str) -> str:
    return f"  {client:>8}{last:>9}{alone:>10}{late:>6}{dropped:>9}  {where}".rstrip()

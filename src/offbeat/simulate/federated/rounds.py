"""Federated rounds in virtual time: who is selected, whose update counts, who is late, and how long a round takes.

Everything follows from a plan and a seed, so that every worker of a run finds the same without a message. The times of
a whole cohort are computed at once; tests hold them equal to the machines of `protocols.federated`, played message by
message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import DataError
from offbeat.protocols.federated.buffered_turns import BufferedTurns, BufferState, ClientTurn, staleness_factor
from offbeat.protocols.federated.plan import ClientSpeeds, RoundPlan, round_failure
from offbeat.protocols.federated.sampling import SeededNumbers, cohort
from offbeat.protocols.partition import mixed

SPEEDS: Final = 0xC0411  # Which of a seed's streams of random numbers these are.
DROPOUT: Final = 0xC0412
FLIGHTS: Final = 0xC0413

Seconds = NDArray[np.float64]


class Participant(Struct, frozen=True):
    """A client whose update counts."""

    client: int
    version: int  # Of the global model that it started from.
    factor: float  # What its update is multiplied by, besides its number of examples: less for stale ones.
    turn: int = 0  # FedBuff: the number of its turn, from which its random numbers follow; 0: that of the round.


class ClientTimes(Struct, frozen=True):
    """When a client was where, in virtual seconds; infinite where it never was, or would not have been."""

    client: int
    asked: float
    downloaded: float
    trained: float
    uploaded: float
    lost: float = math.inf  # When it disappeared.


class RoundOutcome(Struct, frozen=True):
    """One federated round, from the selection of its clients to the update of the global model."""

    number: int  # From 1.
    version: int  # Of the global model after this round: the number of updates that the server has made.
    cohort: tuple[int, ...]  # FedBuff: all that came, were late or were dropped since the last update.
    participants: tuple[Participant, ...]  # In the order in which their updates came; none if the round has failed.
    late: tuple[int, ...]  # Clients that were still at work when the round closed.
    dropped: tuple[int, ...]  # Clients that disappeared.
    started: float
    ended: float
    times: tuple[ClientTimes, ...]  # Of the cohort, in its order; for late ones, as if they had gone on.
    failed: str = ""  # Why the round made no update; else empty.
    bytes_down: int = 0  # Payloads from the server to clients.
    bytes_up: int = 0  # Payloads from clients to the server.
    deadline: float | None = None  # Seconds after which it would end; None: of real clients, when patience does.


class Flight(Struct, frozen=True):
    """A client at work for an asynchronous server."""

    number: int  # How many were asked before.
    client: int
    version: int
    lost: float  # When it disappears; infinite: never.
    times: ClientTimes


class RoundClosing(Struct, frozen=True):
    """When a synchronous round closes, and what it waits for until then; clients by their places in the cohort."""

    ended: float
    came: tuple[int, ...]  # Whose updates count, in the order in which they came.
    last: int | None  # Who came last, or whose silence was noticed last; None: the deadline, or nobody was selected.


class RoundProgress(Struct, frozen=True):
    """Where virtual rounds are, between two of them: from there they go on, in another process too."""

    number: int = 0  # The last round.
    version: int = 0
    now: float = 0.0
    flights: tuple[Flight, ...] = ()  # FedBuff: the clients at work.
    drawn: int = 0  # FedBuff: random numbers used to choose clients.
    asked: int = 0  # FedBuff: clients asked so far.


class VirtualRounds(Iterator[RoundOutcome]):
    """Rounds, one after the other, without end.

    Args:
        plan: How rounds go.
        sizes: The number of examples of each client.
        model_bytes: Size of what each selected client downloads.
        update_bytes: Size of what each uploads.
        seed: All randomness follows from it.
        start: Where to go on: the `progress` of earlier rounds.

    """

    def __init__(
        self,
        plan: RoundPlan,
        sizes: Sequence[int] | NDArray[np.int64],
        model_bytes: int,
        update_bytes: int,
        seed: int,
        start: RoundProgress | None = None,
    ) -> None:
        self.plan = plan
        self.progress = start or RoundProgress()
        self._sizes = np.asarray(sizes, np.int64)
        _check_sizes(plan, self._sizes)
        self._bytes = model_bytes, update_bytes
        self._seed = seed
        self._fleet = _Fleet(plan.speeds or ClientSpeeds(), self._sizes, self._bytes, seed)
        self._chance = SeededNumbers(seed, FLIGHTS)
        self._check_deadline()

    def _check_deadline(self) -> None:
        """Refuse a buffer that would never be full, as too few clients can meet the deadline of their turns."""
        plan = self.plan
        if plan.buffer is None or plan.deadline is None:
            return
        takes = np.sort(self._fleet.takes(np.flatnonzero(self._sizes)).sum(axis=0))
        able = int(np.sum(takes < plan.deadline))
        if able < plan.buffer:
            raise DataError(
                f"only {able:,} of {plan.clients:,} clients can send an update within deadline={plan.deadline:g} s, "
                f"and fedbuff({plan.buffer}) waits for {plan.buffer:,} different ones: no step could ever be made. So "
                f"many need more than {takes[plan.buffer - 1]:.4g} s: raise deadline above that, or lower fedbuff(…)."
            )

    def __next__(self) -> RoundOutcome:
        return self._synchronous() if self.plan.buffer is None else self._buffered()

    # Synchronous rounds.

    def _synchronous(self) -> RoundOutcome:
        plan, before, number = self.plan, self.progress, self.progress.number + 1
        chosen = cohort(plan, self._sizes, self._seed, number)
        downloaded, trained, uploaded = before.now + np.cumsum(self._fleet.takes(chosen), axis=0)
        lost = self._lost(number, chosen, before.now, uploaded)
        closing = close(plan, before.now, uploaded, lost)
        end, counts = closing.ended, set(closing.came)
        failed = round_failure(plan, len(chosen), len(counts))
        clients: list[int] = chosen.tolist()
        self.progress = RoundProgress(number, before.version + (not failed), end)
        gone = np.isfinite(lost) & (lost <= end)
        return RoundOutcome(
            number=number,
            version=self.progress.version,
            cohort=tuple(clients),
            participants=() if failed else tuple(Participant(clients[i], before.version, 1.0) for i in closing.came),
            late=tuple(client for i, client in enumerate(clients) if i not in counts and not gone[i]),
            dropped=tuple(client for i, client in enumerate(clients) if gone[i]),
            started=before.now,
            ended=end,
            times=_times(clients, before.now, downloaded, trained, uploaded, lost),
            failed=failed,
            bytes_down=self._bytes[0] * len(clients),
            bytes_up=self._bytes[1] * int(np.sum((trained <= end) & (trained < lost))),
            deadline=plan.deadline,
        )

    def _lost(self, number: int, chosen: NDArray[np.int64], start: float, uploaded: Seconds) -> Seconds:
        """When each client disappears; infinite: it does not."""
        if not self.plan.dropout:
            return np.full(len(chosen), math.inf)
        random = np.random.default_rng(mixed(self._seed, DROPOUT, number))
        # Drawn for all clients, so that what happens to one does not depend on who else was selected.
        chance, moment = random.random((2, len(self._sizes)))[:, chosen]
        return np.where(chance < self.plan.dropout, start + moment * (uploaded - start), math.inf)

    # Asynchronous rounds: FedBuff.

    def _buffered(self) -> RoundOutcome:
        before = self.progress
        state = BufferState({f.client: ClientTurn(f.number + 1, f.client, f.version) for f in before.flights})
        state.asked, state.drawn = before.asked, before.drawn
        turns = BufferedTurns(self.plan, state, self._seed)
        flights = [(self._due(flight), flight.number, flight) for flight in before.flights]
        heapify(flights)
        now, came, lost, late, full = before.now, list[Flight](), list[Flight](), list[Flight](), False
        while not full:
            for turn in turns.begin(self._sizes, before.version):
                flight = self._flight(turn, now)
                heappush(flights, (self._due(flight), flight.number, flight))
            now, _, flight = heappop(flights)
            if flight.times.uploaded <= now < self._limit(flight):
                came.append(flight)
                full = turns.arrived(flight.client)
            else:
                (lost if flight.lost <= now else late).append(flight)
                turns.given_up(flight.client)
        applied = turns.step()
        self.progress = RoundProgress(
            before.number + 1,
            before.version + 1,
            now,
            tuple(flight for _, _, flight in flights),
            state.drawn,
            state.asked,
        )
        ended = [*came, *late, *lost]
        return RoundOutcome(
            number=before.number + 1,
            version=before.version + 1,
            cohort=tuple(flight.client for flight in ended),
            participants=tuple(participant(turn, before.version) for turn in applied),
            late=tuple(flight.client for flight in late),
            dropped=tuple(flight.client for flight in lost),
            started=before.now,
            ended=now,
            times=tuple(flight.times for flight in ended),
            bytes_down=self._bytes[0] * (state.asked - before.asked),
            bytes_up=self._bytes[1] * sum(flight.times.trained <= now for flight in ended),
            deadline=self.plan.deadline,
        )

    def _flight(self, turn: ClientTurn, now: float) -> Flight:
        client, number = turn.client, turn.number - 1
        downloaded, trained, uploaded = (now + np.cumsum(self._fleet.takes(np.array([client])), axis=0))[:, 0].tolist()
        lost = math.inf
        if self._chance[2 * number] < self.plan.dropout:
            lost = now + self._chance[2 * number + 1] * (uploaded - now)
        (times,) = _times([client], now, *(np.array([at]) for at in (downloaded, trained, uploaded, lost)))
        return Flight(number, client, turn.version, lost, times)

    def _limit(self, flight: Flight) -> float:
        return math.inf if self.plan.deadline is None else flight.times.asked + self.plan.deadline

    def _due(self, flight: Flight) -> float:
        """When the server has its update, or stops waiting for it."""
        noticed = float(_noticed(self.plan, flight.times.asked, np.array([flight.lost]))[0])
        return min(self._limit(flight), flight.times.uploaded if flight.lost == math.inf else noticed)


def close(plan: RoundPlan, started: float, uploaded: Seconds, lost: Seconds) -> RoundClosing:
    """When a synchronous round closes.

    Args:
        plan: How rounds go.
        started: When its clients were asked.
        uploaded: When the update of each client of the cohort arrives, if it does not disappear.
        lost: When each disappears; infinite: it does not.

    """
    count = len(uploaded)
    arrivals = np.where(np.isfinite(lost), math.inf, uploaded)
    goal = count if plan.poisson else min(plan.needed, count)
    limit = math.inf if plan.deadline is None else started + plan.deadline
    order = np.argsort(arrivals, kind="stable")
    came = tuple(order[: min(goal, int(np.sum(arrivals < limit)))].tolist())
    if len(came) == goal:
        return RoundClosing(float(arrivals[came[-1]]), came, came[-1]) if goal else RoundClosing(started, came, None)
    # Until nobody is waited for, or until the deadline.
    waits = np.where(np.isfinite(lost), _noticed(plan, started, lost), arrivals)
    last = int(np.argmax(waits))
    return RoundClosing(limit, came, None) if waits[last] >= limit else RoundClosing(float(waits[last]), came, last)


def participant(turn: ClientTurn, version: int) -> Participant:
    """Whose update is applied to this version of the model."""
    return Participant(turn.client, turn.version, staleness_factor(version - turn.version), turn.number)


class _Fleet:
    """How long each client takes for each phase of its work."""

    def __init__(self, speeds: ClientSpeeds, sizes: NDArray[np.int64], payloads: tuple[int, int], seed: int) -> None:
        normal = np.random.default_rng(mixed(seed, SPEEDS)).standard_normal((len(sizes), 2))
        slowness, width = np.exp(speeds.sigma * normal).T
        self._train = speeds.seconds * slowness * sizes / sizes[sizes > 0].mean()
        self._down, self._up = (payload / (speeds.bandwidth * width) for payload in payloads)

    def takes(self, clients: NDArray[np.int64]) -> Seconds:
        """Seconds of download, training and upload: a row for each phase."""
        return np.stack([self._down[clients], self._train[clients], self._up[clients]])


def _noticed(plan: RoundPlan, start: float, lost: Seconds) -> Seconds:
    """When the server has been without a sign of life for too long."""
    with np.errstate(invalid="ignore"):
        return start + np.floor((lost - start) / plan.beat) * plan.beat + plan.silence


def _times(
    clients: list[int], asked: float, downloaded: Seconds, trained: Seconds, uploaded: Seconds, lost: Seconds
) -> tuple[ClientTimes, ...]:
    ends = [np.where(at < lost, at, math.inf).tolist() for at in (downloaded, trained, uploaded)]
    return tuple(ClientTimes(client, asked, *each) for client, *each in zip(clients, *ends, lost.tolist(), strict=True))


def _check_sizes(plan: RoundPlan, sizes: NDArray[np.int64]) -> None:
    if len(sizes) != plan.clients:
        raise DataError(f"there are {len(sizes):,} parts for {plan.clients:,} clients: give each client one.")
    able = int(np.sum(sizes > 0))
    for name, least in (("fewest", plan.fewest), ("buffer", plan.buffer or 0)):
        if able < least:
            raise DataError(
                f"only {able:,} of {plan.clients:,} clients have examples, but {name}={least:,}: no round could end "
                f"with an update. Give fewer clients more examples, or lower {name}."
            )

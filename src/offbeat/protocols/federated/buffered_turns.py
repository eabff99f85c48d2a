"""Who is asked when under an asynchronous server (FedBuff), and how much each update counts: simulated and real alike.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (2022), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.sampling import Succession


class ClientTurn(Struct, frozen=True):
    """A client's turn: it trains from one version of the model, and sends its update."""

    number: int  # From 1, over all clients.
    client: int
    version: int  # Of the model that it starts from.


class BufferState(Struct):
    """Everything from which an asynchronous server goes on."""

    turns: dict[int, ClientTurn] = {}  # By client: those at work, and those whose updates are in the buffer.
    came: list[int] = []  # Clients whose updates are in the buffer, in the order in which they came.
    asked: int = 0  # Turns begun.
    drawn: int = 0  # Random numbers used to choose clients.

    @property
    def at_work(self) -> list[int]:
        """Clients whose update is waited for."""
        came = set(self.came)
        return [client for client in self.turns if client not in came]


class BufferedTurns:
    """The turns of clients: always as many are at work as a round needs, and each has one update in the buffer at most.

    Args:
        plan: How many are at work, and the size of the buffer.
        state: Kept up to date in place.
        seed: Of the choice of clients.

    """

    def __init__(self, plan: RoundPlan, state: BufferState, seed: int) -> None:
        self.state = state
        self._plan = plan
        self._succession = Succession(np.zeros(0, np.int64), seed, state.drawn)

    def begin(self, sizes: NDArray[np.int64], version: int) -> Iterator[ClientTurn]:
        """Begin turns until enough clients are at work, or none with examples is idle."""
        state, succession = self.state, self._succession
        succession.able = np.flatnonzero(sizes)
        while len(state.turns) - len(state.came) < self._plan.needed:
            client = succession.next(state.turns.keys())
            if client is None:
                break
            state.asked, state.drawn = state.asked + 1, succession.drawn
            state.turns[client] = ClientTurn(state.asked, client, version)
            yield state.turns[client]

    def arrived(self, client: int) -> bool:
        """An update counts; returns whether the buffer is full. The client stays busy until it is applied."""
        self.state.came.append(client)
        return len(self.state.came) >= (self._plan.buffer or 1)

    def given_up(self, client: int) -> None:
        """A client's turn is over without an update."""
        del self.state.turns[client]

    def step(self) -> list[ClientTurn]:
        """The updates in the buffer are applied: the turns that they came from."""
        turns = [self.state.turns.pop(client) for client in self.state.came]
        self.state.came = []
        return turns


def staleness_factor(staleness: int) -> float:
    """The weight of an update computed from a model that is so many versions old (Nguyen et al. 2022, section 5)."""
    return 1 / math.sqrt(1 + staleness)

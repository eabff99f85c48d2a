"""One worker's side of gossip without a beat: a thread averages its row with neighbours' while the worker computes.

The row is apart from the parameters: the thread changes it whenever a pair averages, and the worker, after each step,
adds what it has learned and takes what came of it. So nobody computes on parameters that are half changed.

Under a launcher that keeps the books of who lives, neighbours are found by its plan, on this host or on others, and the
dead are given up when it says so. Under any other, they meet in a folder of one host, and nobody may die.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError, WaitError
from offbeat.protocols.colouring import Keep, Record, Write
from offbeat.protocols.gossip.machine import (
    GO_ON,
    PAUSE,
    STEPPED,
    Ask,
    CopyRow,
    Find,
    Gossiper,
    Grant,
    Lose,
    Message,
    Move,
    MoveHalfway,
)
from offbeat.protocols.gossip.snapshots import GossipCut
from offbeat.protocols.machine import NOTHING, Done, Effect, Ended, Event, Machine, Payload, Received, Send, Start
from offbeat.runtime.events.recorder import RECORDER, About, Mark, Recorder
from offbeat.runtime.groups.coordinated import CoordinatedMembership
from offbeat.runtime.groups.group import Group
from offbeat.runtime.messages import Codec, Endpoint, Inbox, Keys, address_in, drive, private_directory
from offbeat.runtime.servers.plan import ServerPlan

_LONGEST: Final = 512
"""Bytes of a path."""
_PATIENCE: Final = 0.5
"""Seconds until a neighbour on a fast link is late."""


def worker_name(rank: int) -> str:
    """Who a worker is to its neighbours."""
    return f"worker {rank}"


class _Noted:
    """A machine of gossip whose exchanges are written down: rows that were sent, moves that came back."""

    def __init__(self, machine: Gossiper, recorder: Recorder) -> None:
        self._machine, self._recorder = machine, recorder
        self.name = machine.name

    def begin(self, now: float) -> Sequence[Effect]:
        return self._machine.begin(now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        met = self._machine.met
        effects = self._machine.on(event, now)
        if isinstance(event, Received) and self._machine.met > met:
            self._note(Mark.RECEIVED, event.sender, event.message)
        for effect in effects:
            if isinstance(effect, Start) and isinstance(effect.work, MoveHalfway) and isinstance(event, Received):
                self._note(Mark.RECEIVED, event.sender, event.message)
            elif isinstance(effect, Send) and isinstance(effect.message, Ask | Grant):
                self._note(Mark.SENT, effect.to, effect.message)
        return effects

    def _note(self, mark: Mark, peer: str, message: Any) -> None:
        asks = isinstance(message, Ask)
        name = self._recorder.name(
            ("gossip", mark, peer, asks),
            lambda: About("gossip", "row" if asks else "move", peer=int(peer.split()[1]), tag=int(not asks)),
        )
        self._recorder.stamp(int(mark), name, message.number)


class _Cut:
    """What is kept of a worker that is cut."""

    def __init__(self, colour: int = 0, row: NDArray[Any] | None = None) -> None:
        self.colour = colour
        self.row: NDArray[Any] = np.empty(0) if row is None else row
        self.moves: list[NDArray[Any]] = []
        self.place: GossipCut | None = None
        self.whole = threading.Event()
        """Set when nothing more was under way."""


class GossipRecord(NamedTuple):
    """A worker's row when it was cut."""

    colour: int
    row: Tensor
    made: _Cut


Graph = Callable[[Sequence[int]], Sequence[int]]
"""The neighbours of a worker, of the workers that take part."""


class _Homes:
    """Where neighbours are found: by the plan of a run, or in a folder that worker 0 makes."""

    def __init__(self, group: Group, plan: ServerPlan | None) -> None:
        self._group, self._plan = group, plan
        self._made = ExitStack()
        self._folder = ""

    def agree(self) -> None:
        """Agree on the folder, if there is no plan; all workers call this together."""
        if self._plan is None:
            made = str(self._made.enter_context(private_directory())) if self._group.rank == 0 else ""
            raw = made.encode().ljust(_LONGEST, b"\0")
            told = self._group.share(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "the meeting of neighbours")
            self._folder = bytes(told.tolist()).rstrip(b"\0").decode()

    def of(self, name: str) -> str:
        """The address of a worker."""
        return address_in(Path(self._folder), name) if self._plan is None else self._plan.address(name)

    @property
    def keys(self) -> Keys | None:
        """What lets the workers of this run in, and nobody else; none is needed in a private folder."""
        return None if self._plan is None else self._plan.keys

    def patience(self, nbytes: int) -> float:
        """Seconds until a neighbour that has not answered a row of so many bytes is late."""
        return _PATIENCE + (0.0 if self._plan is None else 2 * self._plan.timing.per_byte * nbytes)

    def close(self) -> None:
        """Once all are connected the folder goes, so that it cannot stay behind."""
        self._made.close()


class Chat:
    """A worker's row, and the thread that keeps it in talk with its neighbours; all workers make theirs together."""

    def __init__(self, group: Group, graph: Graph, row: Tensor, seed: int, plan: ServerPlan | None = None) -> None:
        self._group, self._graph = group, graph
        self._homes = _Homes(group, plan)
        self._neighbours = [worker_name(rank) for rank in graph(group.membership.members)]
        nbytes = row.numel() * row.element_size()
        self.machine = Gossiper(worker_name(group.rank), self._neighbours, seed, self._homes.patience(nbytes))
        recorder = RECORDER.get()
        self._driven: Machine = self.machine if recorder is None else _Noted(self.machine, recorder)
        self._row = row.clone()
        self._seen = row.clone()
        self._numbers: NDArray[Any] = self._row.numpy()
        self._lock = threading.Lock()
        self._open, self._meet, self._over = (threading.Event() for _ in range(3))
        self._inbox: Inbox | None = None
        self._endpoint: Endpoint[Any] | None = None
        self._failure: BaseException | None = None
        self._turned = threading.Event()
        self._cut = _Cut()
        self._thread = threading.Thread(target=self._talk, name="offbeat gossip", daemon=True)
        self._introduce()

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        """Find the neighbours."""
        try:
            self._homes.agree()
            self._thread.start()
            self._until(self._open.is_set, lambda: "its own socket")
            self._group.barrier("the meeting of neighbours")
            self._meet.set()
            self._until(lambda: not self._missing(), lambda: ", ".join(self._missing()))
            self._group.barrier("the meeting of neighbours")
            if isinstance(self._group.membership, CoordinatedMembership):
                self._group.membership.tell_of_changes(self._hear)
        finally:
            self._homes.close()

    def _missing(self) -> list[str]:
        """Neighbours that live and have not greeted this worker yet."""
        endpoint, living = self._endpoint, {worker_name(rank) for rank in self._group.membership.members}
        return [name for name in self._neighbours if name in living and not (endpoint and endpoint.has_met(name))]

    def _hear(self, gone: Sequence[int]) -> None:
        """Others take part than before, as whoever keeps the books says; the graph is drawn anew among those who do."""
        if self._inbox is not None:
            for rank in gone:
                self._inbox.put(Ended(worker_name(rank)))
            for rank in self._graph(self._group.membership.members):
                self._inbox.put(Done(("near", worker_name(rank))))

    def _until(self, condition: Callable[[], bool], whom: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._group.timeout.total_seconds()
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise WaitError(
                    f"worker {self._group.rank} waited {self._group.timeout.total_seconds():g} s for {whom()}. Look at "
                    f"the logs of its neighbours: {', '.join(self._neighbours)}."
                )
            time.sleep(0.001)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        try:
            address = self._homes.of(self.machine.name)
            with Endpoint[Any](self.machine.name, Codec(Message), bind=address, keys=self._homes.keys) as endpoint:
                self._endpoint, self._inbox = endpoint, Inbox(endpoint)
                self._open.set()
                self._meet.wait()
                for name in self._neighbours if not self._over.is_set() else ():
                    endpoint.connect(name, self._homes.of(name))
                drive(self._driven, endpoint, self._work, self._over.is_set, inbox=self._inbox)
        except BaseException as error:
            self._failure = error
            self._open.set()

    def _work(self, item: Any, token: Any) -> Any:
        """What the machine asks for. Rows that are sent are copies: they stay as they are until they are answered."""
        del token
        with self._lock:
            match item:
                case CopyRow():
                    return _payload(self._numbers.copy())
                case MoveHalfway(row):
                    move = (self._of(row) - self._numbers) / 2
                    self._numbers += move
                    return _payload(move)
                case Move(by):
                    self._numbers -= self._of(by)
                case Record(colour):
                    self._cut = _Cut(colour, self._numbers.copy())
                    self._turned.set()
                case Keep(payload=move):
                    self._cut.moves.append(self._of(move).copy())
                case Write(_, cut):
                    self._cut.place = cut
                    self._cut.whole.set()
                case Lose(name) if self._endpoint is not None:
                    self._endpoint.forget(name)
                case Find(name) if self._endpoint is not None:
                    self._endpoint.connect(name, self._homes.of(name))
                case _:
                    pass
        return NOTHING

    def _of(self, payload: Payload) -> NDArray[Any]:
        """What a neighbour has sent, as numbers."""
        if payload.nbytes != self._numbers.nbytes:
            raise RunError(
                f"{self.machine.name} was sent {payload.nbytes:,} bytes by a neighbour, and its model has "
                f"{self._numbers.nbytes:,}. All workers must train the same model."
            )
        return np.frombuffer(payload.handle, dtype=self._numbers.dtype)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether a neighbour has been cut by a snapshot that this worker has not."""
        return self.machine.colour.due

    def cut(self, clock: int, anew: bool) -> GossipRecord | None:
        """Between two steps: be cut by the snapshot that is due, or by a new one; None if it is too late for that."""
        if self._inbox is None:
            return None
        self._turned.clear()
        colour = self.machine.colour.own + 1 if anew else 0
        self._inbox.put(Done(("turn", colour, clock, self._group.calls)))
        self._until(self._turned.is_set, lambda: "its own thread")
        made = self._cut
        return GossipRecord(made.colour, torch.from_numpy(made.row), made) if made.colour else None

    def wait_for(self, made: _Cut) -> tuple[GossipCut, list[NDArray[Any]]] | None:
        """All that was under way to this worker when it was so cut; None if that is never known."""
        while not made.whole.wait(0.05):
            if self._over.is_set() or self._failure is not None or made is not self._cut:
                return None
        return None if made.place is None else (made.place, made.moves)

    # -- the worker --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has gone wrong in the thread, or if the others have gone on without this worker."""
        if isinstance(self._group.membership, CoordinatedMembership):
            self._group.membership.check()
        if self._failure is not None:
            raise RunError(f"gossip of {self.machine.name} has failed: {self._failure}") from self._failure

    def exchange(self, row: Tensor) -> None:
        """Add what the worker has learned, and replace the row by what came of it and of its neighbours."""
        self.check()
        with self._lock:
            self._row.add_(row).sub_(self._seen)
            row.copy_(self._row)
        self._seen.copy_(row)

    @property
    def bytes_sent(self) -> int:
        """Of rows and moves, to neighbours."""
        endpoint = self._endpoint
        return 0 if endpoint is None else sum(traffic.bytes_sent for traffic in list(endpoint.traffic.values()))

    def stepped(self) -> None:
        """There is something to tell the neighbours."""
        self._tell(STEPPED)

    def start_from(self, row: Tensor) -> None:
        """Forget the row, and start from this one."""
        with self._lock:
            self._row.copy_(row)
            self._seen.copy_(row)

    def pause(self) -> None:
        """Return when no worker asks any more and every move that was granted is made; all live workers call this."""
        self._tell(PAUSE)
        self._until(lambda: self.machine.at_rest, lambda: f"the answer of {', '.join(self.machine.asked)}")
        self._group.barrier("the rest of gossip")

    def go_on(self) -> None:
        """The pause is over for this worker."""
        self._tell(GO_ON)

    def _tell(self, word: str) -> None:
        if self._inbox is not None:
            self._inbox.put(Done(word))

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._meet.set()
        if self._endpoint is not None:
            self._endpoint.wake()
        self._thread.join()


def _payload(numbers: NDArray[Any]) -> Payload:
    return Payload(numbers.nbytes, numbers)

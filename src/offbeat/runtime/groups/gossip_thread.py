"""One worker's side of asynchronous gossip: a thread averages its row with neighbours' while the worker computes.

The thread changes a row of its own whenever a pair averages, and the worker, after each step, adds its update and takes
the result. So no step computes on half-changed parameters. Without a plan, workers meet in a folder of one host, and
none of them may die.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError, WaitError
from offbeat.protocols.colouring import Keep, Record, Write
from offbeat.protocols.gossip import machine as gossip
from offbeat.protocols.gossip.machine import Ask, Gossiper, Grant, MoveHalfway
from offbeat.protocols.gossip.snapshots import GossipCut
from offbeat.protocols.machine import NOTHING, Done, Effect, Ended, Event, Machine, Payload, Received, Send, Start
from offbeat.protocols.servers.messages import worker_name
from offbeat.runtime.events.recorder import RECORDER, About, Mark, Recorder
from offbeat.runtime.groups.coordinated_group import CoordinatedMembership
from offbeat.runtime.groups.group import Group
from offbeat.runtime.messages import Codec, Endpoint, Inbox, Keys, address_in, drive, private_directory
from offbeat.runtime.servers.plan import ServerPlan

_LONGEST: Final = 512  # Bytes of a path.
_PATIENCE: Final = 0.5  # Seconds until a neighbour on a fast link is late.
Graph = Callable[[Sequence[int]], Sequence[int]]  # From the workers that take part to the neighbours of this one.


class _RecordedGossip:
    """A gossip machine whose exchanges are recorded: rows sent, and moves that came back."""

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


class GossipRecord:
    """A worker's row when a snapshot cut it, and the moves in flight to it."""

    def __init__(self, colour: int = 0, row: NDArray[Any] | None = None) -> None:
        self.colour = colour
        self.row = torch.from_numpy(np.empty(0) if row is None else row)
        self.moves: list[NDArray[Any]] = []
        self.place: GossipCut | None = None
        self.whole = threading.Event()  # Set when nothing more was in flight.


class _Homes:
    """Addresses of neighbours: from the plan of a run, or in a folder that worker 0 creates."""

    def __init__(self, group: Group, plan: ServerPlan | None) -> None:
        self._group, self._plan = group, plan
        self._created = ExitStack()
        self._folder = ""
        self.keys: Keys | None = None if plan is None else plan.keys
        """Authenticate the workers of this run; not needed in a private folder."""

    def agree(self) -> None:
        """Agree on the folder, if there is no plan; all workers call this together."""
        if self._plan is None:
            path = str(self._created.enter_context(private_directory())) if self._group.rank == 0 else ""
            raw = path.encode().ljust(_LONGEST, b"\0")
            shared = self._group.share(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "the meeting of neighbours")
            self._folder = bytes(shared.tolist()).rstrip(b"\0").decode()

    def of(self, name: str) -> str:
        return address_in(Path(self._folder), name) if self._plan is None else self._plan.address(name)

    def patience(self, nbytes: int) -> float:
        """Seconds until a neighbour that has not answered a row of `nbytes` is late."""
        return _PATIENCE + (0.0 if self._plan is None else 2 * self._plan.timing.per_byte * nbytes)

    def close(self) -> None:
        """Remove the folder once all are connected, so that it cannot stay behind."""
        self._created.close()


class GossipThread:
    """A worker's row, and the thread that averages it with its neighbours'; all workers create theirs together."""

    def __init__(self, group: Group, graph: Graph, row: Tensor, seed: int, plan: ServerPlan | None = None) -> None:
        self._group, self._graph = group, graph
        self._homes = _Homes(group, plan)
        self._neighbours = [worker_name(rank) for rank in graph(group.membership.members)]
        nbytes = row.numel() * row.element_size()
        self.machine = Gossiper(worker_name(group.rank), self._neighbours, seed, self._homes.patience(nbytes))
        recorder = RECORDER.get()
        self._driven: Machine = self.machine if recorder is None else _RecordedGossip(self.machine, recorder)
        self._row = row.clone()
        self._seen = row.clone()
        self._numbers: NDArray[Any] = self._row.numpy()
        self._lock = threading.Lock()
        self._open, self._meet, self._over = (threading.Event() for _ in range(3))
        self._inbox: Inbox | None = None
        self._endpoint: Endpoint[Any] | None = None
        self._failure: BaseException | None = None
        self._turned = threading.Event()
        self._cut = GossipRecord()
        self._thread = threading.Thread(target=self._talk, name="offbeat gossip", daemon=True)
        self._introduce()

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
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
        """Live neighbours that have not greeted this worker yet."""
        endpoint, living = self._endpoint, {worker_name(rank) for rank in self._group.membership.members}
        return [name for name in self._neighbours if name in living and not (endpoint and endpoint.has_met(name))]

    def _hear(self, gone: Sequence[int]) -> None:
        """Membership has changed, according to the coordinator: the graph is drawn anew among those who take part."""
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
            with Endpoint[Any](
                self.machine.name, Codec(gossip.Message), bind=address, keys=self._homes.keys
            ) as endpoint:
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
        """Do the machine's work. Rows are sent as copies: they must not change until they are answered."""
        del token
        with self._lock:
            match item:
                case gossip.CopyRow():
                    return _payload(self._numbers.copy())
                case MoveHalfway(row):
                    move = (self._of(row) - self._numbers) / 2
                    self._numbers += move
                    return _payload(move)
                case gossip.Move(by):
                    self._numbers -= self._of(by)
                case Record(colour):
                    self._cut = GossipRecord(colour, self._numbers.copy())
                    self._turned.set()
                case Keep(payload=move):
                    self._cut.moves.append(self._of(move).copy())
                case Write(_, cut):
                    self._cut.place = cut
                    self._cut.whole.set()
                case gossip.Lose(name) if self._endpoint is not None:
                    self._endpoint.forget(name)
                case gossip.Find(name) if self._endpoint is not None:
                    self._endpoint.connect(name, self._homes.of(name))
                case _:
                    pass
        return NOTHING

    def _of(self, payload: Payload) -> NDArray[Any]:
        if payload.nbytes != self._numbers.nbytes:
            raise RunError(
                f"{self.machine.name} got {payload.nbytes:,} bytes from a neighbour, and its model has "
                f"{self._numbers.nbytes:,}. All workers must train the same model."
            )
        return np.frombuffer(payload.handle, dtype=self._numbers.dtype)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether a snapshot has cut a neighbour, but not this worker."""
        return self.machine.colour.due

    def cut(self, clock: int, anew: bool) -> GossipRecord | None:
        """Between two steps: join the snapshot that is due, or start a new one; None if it is too late for that."""
        if self._inbox is None:
            return None
        self._turned.clear()
        colour = self.machine.colour.own + 1 if anew else 0
        self._inbox.put(Done(("turn", colour, clock, self._group.calls)))
        self._until(self._turned.is_set, lambda: "its own thread")
        return self._cut if self._cut.colour else None

    def wait_for(self, record: GossipRecord) -> tuple[GossipCut, list[NDArray[Any]]] | None:
        """Everything in flight to this worker when it was cut; None if that will never be known."""
        while not record.whole.wait(0.05):
            if self._over.is_set() or self._failure is not None or record is not self._cut:
                return None
        return None if record.place is None else (record.place, record.moves)

    # -- the worker --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error of the thread, or if the others have gone on without this worker."""
        if isinstance(self._group.membership, CoordinatedMembership):
            self._group.membership.check()
        if self._failure is not None:
            raise RunError(f"gossip of {self.machine.name} has failed: {self._failure}") from self._failure

    def exchange(self, row: Tensor) -> None:
        """Add the worker's update, and replace the row by the average with its neighbours."""
        self.check()
        with self._lock:
            self._row.add_(row).sub_(self._seen)
            row.copy_(self._row)
        self._seen.copy_(row)

    @property
    def bytes_sent(self) -> int:
        """Bytes of rows and moves sent to neighbours."""
        endpoint = self._endpoint
        return 0 if endpoint is None else sum(traffic.bytes_sent for traffic in list(endpoint.traffic.values()))

    def stepped(self) -> None:
        """Tell the machine that the worker has made a step."""
        self._tell(gossip.STEPPED)

    def start_from(self, row: Tensor) -> None:
        """Replace the row."""
        with self._lock:
            self._row.copy_(row)
            self._seen.copy_(row)

    def pause(self) -> None:
        """Return when no worker asks any more and all granted moves are made; all live workers call this."""
        self._tell(gossip.PAUSE)
        self._until(lambda: self.machine.at_rest, lambda: f"the answer of {', '.join(self.machine.asked)}")
        self._group.barrier("the rest of gossip")

    def go_on(self) -> None:
        """End the pause of this worker."""
        self._tell(gossip.GO_ON)

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

"""Gossip without a beat: pairs of workers average while all go on computing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.gossip.topology import Mixing
from offbeat.protocols.partition import mixed
from offbeat.runtime.groups.coordinated import CoordinatedGroup
from offbeat.runtime.groups.gossip_thread import GossipThread
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.plan import ServerPlan
from offbeat.runtime.state.snapshots import SnapshotCut, write_moves
from offbeat.strategies.worker.flat_rows import Rows
from offbeat.strategies.worker.model_mixing import Parted

_KINDS = (torch.float32, torch.float64, torch.float16)


class Pairing(Parted):
    """A worker whose row of parameters is averaged with neighbours' by a thread of its own."""

    unforeseen = "who meets whom is decided as it happens"

    def __init__(
        self,
        group: Group,
        stopwatch: Stopwatch,
        strategy: str,
        mixings: Callable[[int], Mixing],
        plan: ServerPlan | None = None,
    ) -> None:
        super().__init__(group, stopwatch, strategy, mixings(group.size))
        self._mixings, self._plan = mixings, plan
        self._parameters: list[Parameter] = []
        self._rows = Rows(())
        self._chat: GossipThread | None = None
        self._sent = 0
        self._wanted = False

    @property
    def lockstep(self) -> bool:
        """Nobody waits for anybody."""
        return False

    def install(self, model: nn.Module) -> None:
        """Its parameters lie in the row; all models must be there when training begins."""
        if self._chat is not None:
            raise StrategyError(
                f"{self.strategy} lays all models out in one row when training begins, and another model was prepared "
                f"after that. Give all models to the first prepare(), or use gossip without asynchronous=True."
            )
        self._parameters += model.parameters()

    def begin(self) -> None:
        """Lay out the row and meet the neighbours."""
        self._rows = Rows(self._parameters)
        rows = self._rows.read()
        if len(rows) != 1 or rows[0].dtype not in _KINDS or rows[0].device.type != "cpu":
            said = ", ".join(sorted({str(row.dtype).removeprefix("torch.") for row in rows})) or "none"
            raise StrategyError(
                f"{self.strategy} sends one row of float32, float64 or float16 on CPUs; these models have {said} on "
                f"{self._parameters[0].device if self._parameters else 'no device'}. Use gossip without "
                f"asynchronous=True."
            )
        seed = mixed(torch.initial_seed() % 2**62, self.group.rank)
        self._chat = GossipThread(self.group, self._neighbours, rows[0], seed, self._plan)

    def _neighbours(self, members: Sequence[int]) -> list[int]:
        """Of this worker among those who take part; all of them, if they are too few or too many for such a graph."""
        among = sorted({self.group.rank, *members})
        try:
            places = self._mixings(len(among)).neighbours(among.index(self.group.rank)).tolist()
        except StrategyError:
            return [rank for rank in among if rank != self.group.rank]
        return [among[place] for place in places]

    def stepped(self, number: int, optimizer: Optimizer) -> None:
        """Take what neighbours have brought, and have something to tell them."""
        del number, optimizer
        if self._chat is not None:
            self._catch_up(self._chat)
            self._chat.stepped()

    def _catch_up(self, chat: GossipThread) -> None:
        """The row gets the worker's steps, the parameters get what came of them."""
        with self.stopwatch.spent_on("communicate"):
            rows = self._rows.read()
            chat.exchange(rows[0])
            self._rows.write(rows)

    @contextmanager
    def _resting(self) -> Generator[None]:
        """Inside, no move is under way, and the mean of all models is that of the whole run."""
        if self._chat is None:
            yield
            return
        with self.stopwatch.spent_on("wait"):
            self._chat.pause()
        self._catch_up(self._chat)
        try:
            yield
        finally:
            self._chat.go_on()

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, all rest, and hold the mean of the replicas."""
        with self._resting(), super().averaged(models):
            yield

    def notes(self) -> dict[str, Any]:
        """What the graph promises, and how many pairs have met."""
        machine = None if self._chat is None else self._chat.machine
        counts = [0.0] * 3 if machine is None else [float(n) for n in (machine.met, machine.refused, machine.overdue)]
        met, refused, overdue = self.group.gather(counts, "the count of pairs").sum(dim=0).tolist()
        pairs = {"pairs": int(met), "refused": int(refused), "overdue": int(overdue)}
        return {"gossip": {**super().notes()["gossip"], **pairs}}

    def payload(self) -> int:
        """What was sent to neighbours, and to the coordinator, which averages models for evaluations."""
        client = self.group.client.connection.bytes_sent if isinstance(self.group, CoordinatedGroup) else 0
        return self._sent + client + (0 if self._chat is None else self._chat.bytes_sent)

    @property
    def snapshots(self) -> bool:
        """Once pairs meet."""
        return self._chat is not None

    @property
    def publishes(self) -> bool:
        """Nobody else keeps count: whoever leads looks whether the parts of all who live are there."""
        return self._chat is not None and self.group.membership.leads

    def want_snapshot(self) -> None:
        """At the next boundary; neighbours hear of it."""
        self._wanted = True

    def cut(self, clock: int) -> SnapshotCut | None:
        """The row, as it is between two moves; grants that are still to come are kept beside it."""
        chat = self._chat
        if chat is None or not (self._wanted or chat.due):
            return None
        self._catch_up(chat)
        anew, self._wanted = self._wanted, False
        found = chat.cut(clock, anew)
        if found is None:
            return None

        def write_channel(folder: Path) -> None:
            known = chat.wait_for(found)
            if known is not None:
                write_moves(folder, *known)

        return SnapshotCut(found.colour, None, {"sent": self.payload(), "row": found.row}, None, write_channel)

    def state_dict(self) -> dict[str, Any]:
        """All rest, so that the parameters, which are kept with the model, are all there is to know."""
        with self._resting():
            return {"sent": self.payload()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start from the parameters of the checkpoint; nobody asks before all have theirs."""
        self._sent = int(state["sent"])
        if self._chat is not None:
            self._chat.pause()
            if "row" in state:
                self._rows.write([state["row"]])
            self._chat.start_from(self._rows.read()[0])
            self.group.barrier("the return to a checkpoint")
            self._chat.go_on()

    def close(self) -> None:
        """End the talk."""
        super().close()
        if self._chat is not None:
            self._chat.close()

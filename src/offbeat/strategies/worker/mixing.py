"""Workers that step on their own models and mix them afterwards: in lockstep, compressed, or in asynchronous pairs."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.gossip.topology import Mixing
from offbeat.protocols.partition import mixed
from offbeat.protocols.schedule import View
from offbeat.runtime.compression import Coder, CompressionAccount, GroupLink, together
from offbeat.runtime.groups.coordinated_group import CoordinatedGroup
from offbeat.runtime.groups.gossip_thread import GossipThread
from offbeat.runtime.groups.group import Group
from offbeat.runtime.groups.neighbours import Neighbours, RowMixer
from offbeat.runtime.hosts.link_probe import measured
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.plan import ServerPlan
from offbeat.runtime.state.snapshots import SnapshotCut, write_moves
from offbeat.simulate.predicted_step import Step, Timed
from offbeat.strategies.compressors import compressor
from offbeat.strategies.worker.exchange import Exchange, averaged_buffers, refuse_closure
from offbeat.strategies.worker.flat_rows import Idle, Rows, averaged_parameters, parameters_of, still_fits
from offbeat.strategies.worker.step_cost import why_not

_ASYNCHRONOUS_DTYPES = (torch.float32, torch.float64, torch.float16)


class MixingWorker(Exchange):
    """Leaves gradients local, and mixes models after optimizer steps."""

    replicated = False
    mixes = True
    acts_in_steps = True

    def __init__(self, group: Group, stopwatch: Stopwatch, strategy: str, mixing: Mixing) -> None:
        super().__init__(group, stopwatch)
        self.strategy, self.mixing = strategy, mixing
        self.held = False
        self.distance: float | None = None
        """Root mean square distance of the replicas to their mean, when it was last measured."""
        self._examples: int | None = None
        self._idle = Idle()
        self._optimizers: list[Optimizer] = []

    def install(self, model: nn.Module) -> None:
        """Gradients stay local, so there is nothing to hook."""

    def weigh(self, examples: int, total: int | None) -> None:
        """A worker without examples does not step."""
        del total
        self._examples = examples

    def suspend(self, held: bool) -> None:
        """While held, models are not mixed."""
        self.held = held

    def attend(self, optimizer: Optimizer) -> None:
        """Mix after its steps."""
        if self.group.size > 1:
            number = len(self._optimizers)
            self._optimizers.append(optimizer)
            self._hook_steps(optimizer, self._before, partial(self._after, number))

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_closure(self.strategy, args, kwargs)
        if self._examples == 0:
            self._idle.hide(optimizer)

    def _after(self, number: int, optimizer: Optimizer, *_: Any) -> None:
        self._idle.restore()
        if not self.held:
            self.stepped(number, optimizer)

    @abstractmethod
    def stepped(self, number: int, optimizer: Optimizer) -> None:
        """An optimizer has stepped: mix its parameters."""

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, all workers hold the mean of the replicas; their distance to it is measured."""
        with averaged_buffers(models, self.group), averaged_parameters(models, self.group) as distances:
            if self.group.size > 1:
                self.distance = float(np.sqrt(np.mean(np.square(distances))))
            yield

    def figures(self) -> dict[str, Any]:
        """Distance between the replicas at the last evaluation."""
        return {} if self.distance is None else {"distance": self.distance}

    def notes(self) -> dict[str, Any]:
        """Mixing rates that the graph predicts."""
        predicted = {"spectral_gap": self.mixing.gap, "rate": self.mixing.rate, "usual_rate": self.mixing.usual_rate}
        return {"gossip": {**predicted, "distance": self.distance}}


class GossipWorker(MixingWorker):
    """Mixes in lockstep, by the schedule of the graph."""

    def __init__(self, group: Group, stopwatch: Stopwatch, strategy: str, mixing: Mixing, gamma: float) -> None:
        super().__init__(group, stopwatch, strategy, mixing)
        self._gamma = gamma
        self._estimates: list[list[_Estimates]] = []
        self._mixer = RowMixer(group, self.mixing.matrices)
        self._rows: dict[int, Rows] = {}
        self._exchanges: dict[int, tuple[Exchanged, ...]] = {}
        self._turns: dict[int, int] = {}
        self._measured_rate: float | None = None
        self._trials: tuple[Timed, ...] = ()

    def begin(self) -> None:
        """Measure the links; all models are still equal, so they are the first estimates."""
        if self.group.size == 1:
            return
        if why_not(self.group) is None:
            rows = [Rows(parameters_of(optimizer)) for optimizer in self._optimizers]
            most = sum(tensor.nbytes for each in rows for tensor in each.tensors)
            self._trials = measured(
                self.group, most, lambda size: partial(self._mixer.mix, [torch.zeros(max(1, size // 4))], 0)
            )
        if self.compressions:
            self._estimates = [self._first_estimates(n, optimizer) for n, optimizer in enumerate(self._optimizers)]

    def predicted(self) -> Step | str:
        """The exchanges of each optimizer's last step, with the neighbours of every turn."""
        last = [each for exchanges in self._exchanges.values() for each in exchanges]
        reason = why_not(self.group, self.compressions)
        return reason or every_turn(last, self.mixing, self.group.direct.view, self._trials)

    def _first_estimates(self, number: int, optimizer: Optimizer) -> list[_Estimates]:
        rows, (matrix,) = Rows(parameters_of(optimizer)), self.mixing.matrices
        rank = self.group.rank
        neighbours = Neighbours(self.group.direct, matrix)
        weights = [float(matrix[rank, other]) for other in neighbours.ranks]
        estimates: list[_Estimates] = []
        for place, (row, shapes) in enumerate(zip(rows.read(), rows.shapes, strict=True)):
            if row.dtype not in (torch.float32, torch.float64):
                raise StrategyError(
                    f"{self.strategy} with a compressor mixes rows of float32 or float64, and this model has "
                    f"{row.dtype}. Omit the compressor."
                )
            coder = compressor(self.compressions, shapes, mixed(self.seed, number, place), rank).coder
            estimates.append(_Estimates(row, neighbours, weights, coder, self._gamma))
        return estimates

    def stepped(self, number: int, optimizer: Optimizer) -> None:
        """Let the neighbours have each row, and take the weighted mean of it and theirs."""
        if number not in self._rows:
            self._rows[number] = Rows(parameters_of(optimizer))
        rows = self._rows[number]
        still_fits(rows, optimizer, self.strategy)
        turn = self._turns.get(number, 0)
        with self.stopwatch.spent_on("communicate"):
            self.group.sent.record()
            if self.compressions:
                self._mix_compressed(number, turn)
            else:
                with rows.in_place() if self._mixer.in_memory else rows.copied() as opened:
                    for tensors in opened:
                        self._mixer.mix(tensors, turn)
            self._exchanges[number] = self.group.sent.recorded()
        self._turns[number] = turn + 1

    def _mix_compressed(self, number: int, turn: int) -> None:
        def dense(row: Tensor) -> None:
            self._mixer.mix([row], turn)

        with self._rows[number].copied() as opened:
            for (row,), estimates in zip(opened, self._estimates[number], strict=True):
                with estimates.account.counted(self.group.direct, row, "messages to neighbours", dense) as link:
                    estimates.mix(row, link)

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Also mix a copy once more, to measure by how much that brings the replicas together."""
        rows = Rows(p for model in models for p in model.parameters())
        own = rows.read() if self.group.size > 1 else []
        with super().averaged(models):
            if own and self.distance and not self.compressions:
                for row in own:
                    self._mixer.mix([row], self._turns.get(0, 0))
                apart = sum(float((a - b).abs().double().square().sum()) for a, b in zip(own, rows.read(), strict=True))
                left = self.group.gather([apart], "the distance of models")[:, 0].mean()
                self._measured_rate = float(left.sqrt()) / self.distance
            yield

    def notes(self) -> dict[str, Any]:
        """Mixing rates predicted by the graph and measured at the last evaluation; savings of compression."""
        notes: dict[str, Any] = {"gossip": {**super().notes()["gossip"], "measured_rate": self._measured_rate}}
        if self._estimates:
            accounts = [estimates.account for rows in self._estimates for estimates in rows]
            notes["compression"] = together(accounts, self.group)
        return notes

    def state_dict(self) -> dict[str, Any]:
        """How often each optimizer's parameters were mixed, and the estimates of compressed gossip."""
        known = [[estimates.state_dict() for estimates in rows] for rows in self._estimates]
        return {"mixed": [self._turns.get(number, 0) for number in range(len(self._optimizers))], "known": known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the same turn of the graph."""
        self._turns = {number: int(count) for number, count in enumerate(state["mixed"])}
        for rows, saved_rows in zip(self._estimates, state["known"], strict=True):
            for estimates, saved in zip(rows, saved_rows, strict=True):
                estimates.load_state_dict(saved)


def every_turn(sent: Sequence[Exchanged], mixing: Mixing, view: View, trials: tuple[Timed, ...] = ()) -> Step:
    """A step that repeats the exchanges of one turn with the neighbours of every turn."""
    exchanges = tuple(replace(each, by=str(turn)) for turn in range(len(mixing.matrices)) for each in sent)
    matrices = tuple(tuple(map(tuple, matrix.tolist())) for matrix in mixing.matrices)
    return Step(hosts=tuple(view.hosts.tolist()), exchanges=exchanges, matrices=matrices, trials=trials)


class _Estimates:
    """One worker's estimate of its own row, and the weighted sum of the estimates of its neighbours' rows.

    Every worker and its neighbours keep the same estimate of its model, and its messages bring that estimate nearer to
    the model. What a message leaves out is still in the next difference, so no error feedback is needed. Weights are
    symmetric, so the mean of all models is kept. Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and
    Gossip Algorithms with Compressed Communication" (2019), algorithm 2 (CHOCO-SGD).
    """

    def __init__(
        self, start: Tensor, neighbours: Neighbours, weights: Sequence[float], coder: Coder, gamma: float
    ) -> None:
        self._neighbours, self._weights, self._coder, self._gamma = neighbours, list(weights), coder, gamma
        self._total = sum(self._weights)
        self._own = start.clone()
        self._others = start * self._total
        self.account = CompressionAccount()

    def mix(self, row: Tensor, link: GroupLink) -> None:
        """Send the change of this row to the neighbours, and move it towards the estimates of theirs."""
        message = self._coder.encode(row - self._own)
        self._coder.add(message, self._own)
        start = time.perf_counter()
        received = self._neighbours.trade(message, self._coder.fixed, "messages to neighbours")
        link.nbytes, link.seconds = message.nbytes, time.perf_counter() - start
        for weight, other in zip(self._weights, received, strict=True):
            self._coder.add(other, self._others, weight)
        torch.add(row, self._others, alpha=self._gamma, out=row)
        row.sub_(self._own, alpha=self._gamma * self._total)

    def state_dict(self) -> dict[str, Any]:
        return {"own": self._own, "others": self._others, "coder": self._coder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._own, self._others = state["own"].clone(), state["others"].clone()
        self._coder.load_state_dict(state["coder"])


class AsyncGossipWorker(MixingWorker):
    """Averages its row of parameters with one neighbour at a time, in a thread of its own."""

    unpredicted = "which workers meet is decided during the run"

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
        self._snapshot_requested = False

    @property
    def lockstep(self) -> bool:
        """No worker waits for another."""
        return False

    def install(self, model: nn.Module) -> None:
        """Add its parameters to the row; all models must be known when training begins."""
        if self._chat is not None:
            raise StrategyError(
                f"{self.strategy} lays all models out in one row when training begins, and another model was prepared "
                f"after that. Give all models to the first prepare(), or use gossip without asynchronous=True."
            )
        self._parameters += model.parameters()

    def begin(self) -> None:
        """Lay out the row and connect to the neighbours."""
        self._rows = Rows(self._parameters)
        rows = self._rows.read()
        if len(rows) != 1 or rows[0].dtype not in _ASYNCHRONOUS_DTYPES or rows[0].device.type != "cpu":
            kinds = ", ".join(sorted({str(row.dtype).removeprefix("torch.") for row in rows})) or "none"
            raise StrategyError(
                f"{self.strategy} sends one row of float32, float64 or float16 on CPUs; these models have {kinds} on "
                f"{self._parameters[0].device if self._parameters else 'no device'}. Use gossip without "
                f"asynchronous=True."
            )
        seed = mixed(torch.initial_seed() % 2**62, self.group.rank)
        self._chat = GossipThread(self.group, self._neighbours, rows[0], seed, self._plan)

    def _neighbours(self, members: Sequence[int]) -> list[int]:
        """The worker's neighbours among the members; all of them, if the graph does not exist for their number."""
        among = sorted({self.group.rank, *members})
        try:
            places = self._mixings(len(among)).neighbours(among.index(self.group.rank)).tolist()
        except StrategyError:
            return [rank for rank in among if rank != self.group.rank]
        return [among[place] for place in places]

    def stepped(self, number: int, optimizer: Optimizer) -> None:
        """Apply what neighbours have sent, and offer the new parameters to them."""
        del number, optimizer
        if self._chat is not None:
            self._catch_up(self._chat)
            self._chat.stepped()

    def _catch_up(self, chat: GossipThread) -> None:
        """Bring the worker's steps into the row, and the row's averages into the parameters."""
        with self.stopwatch.spent_on("communicate"):
            rows = self._rows.read()
            chat.exchange(rows[0])
            self._rows.write(rows)

    @contextmanager
    def _paused(self) -> Generator[None]:
        """Inside, no move is in flight, so the mean of all models is that of the whole run."""
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
        """Inside, gossip is paused, and all workers hold the mean of the replicas."""
        with self._paused(), super().averaged(models):
            yield

    def notes(self) -> dict[str, Any]:
        """Mixing rates that the graph predicts, and counts of pairs."""
        machine = None if self._chat is None else self._chat.machine
        counts = [0.0] * 3 if machine is None else [float(n) for n in (machine.met, machine.refused, machine.overdue)]
        met, refused, overdue = self.group.gather(counts, "the count of pairs").sum(dim=0).tolist()
        pairs = {"pairs": int(met), "refused": int(refused), "overdue": int(overdue)}
        return {"gossip": {**super().notes()["gossip"], **pairs}}

    def payload(self) -> int:
        """Bytes sent to neighbours, and to the coordinator, which averages models for evaluations."""
        client = self.group.client.connection.bytes_sent if isinstance(self.group, CoordinatedGroup) else 0
        return self._sent + client + (0 if self._chat is None else self._chat.bytes_sent)

    @property
    def snapshots(self) -> bool:
        """Once the neighbours are connected."""
        return self._chat is not None

    @property
    def publishes(self) -> bool:
        """The leader checks whether the parts of all live workers are there."""
        return self._chat is not None and self.group.membership.leads

    def want_snapshot(self) -> None:
        """Request a snapshot at the next boundary; neighbours are told."""
        self._snapshot_requested = True

    def cut(self, clock: int) -> SnapshotCut | None:
        """The row between two moves; grants still in flight are recorded beside it."""
        chat = self._chat
        if chat is None or not (self._snapshot_requested or chat.due):
            return None
        self._catch_up(chat)
        anew, self._snapshot_requested = self._snapshot_requested, False
        cut = chat.cut(clock, anew)
        if cut is None:
            return None

        def write_channel(folder: Path) -> None:
            moves = chat.wait_for(cut)
            if moves is not None:
                write_moves(folder, *moves)

        return SnapshotCut(cut.colour, None, {"sent": self.payload(), "row": cut.row}, None, write_channel)

    def state_dict(self) -> dict[str, Any]:
        """The bytes sent; parameters are saved with the model, and while gossip is paused nothing else is in flight."""
        with self._paused():
            return {"sent": self.payload()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start from the parameters of the checkpoint; no worker gossips before all have theirs."""
        self._sent = int(state["sent"])
        if self._chat is not None:
            self._chat.pause()
            if "row" in state:
                self._rows.write([state["row"]])
            self._chat.start_from(self._rows.read()[0])
            self.group.barrier("the return to a checkpoint")
            self._chat.go_on()

    def close(self) -> None:
        """Remove the hooks, and end the thread."""
        super().close()
        if self._chat is not None:
            self._chat.close()

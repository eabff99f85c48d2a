"""Hogwild!: workers of one host update the same parameters, without locks and without waiting for each other.

Where gradients are sparse, two workers seldom touch the same number; where they do, an update may be lost, or be
computed from parameters that another worker has half updated.

Niu, Recht, Ré and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent" (2011).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import nn, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.events.recorder import RECORDER, About, Mark
from offbeat.runtime.gradients.optimizers import scale_rates
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies._base import Traits
from offbeat.strategies.worker.exchange import Exchange, Exchanging, averaged_buffers, refuse_closure
from offbeat.strategies.worker.flat_rows import LINE, SHARING, Idle, parameters_of, share_parameters

OPTIMIZERS: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.SparseAdam, optim.Adagrad),
    *(optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam),
)
"""Elementwise optimizers whose steps are proportional to their learning rate."""
MOST_STALE: Final = 1000
"""Larger staleness is counted as this."""
_SHARED: Final = "shared parameters"
"""Name of their group of events."""
_READ: Final = int(Mark.READ)


@dataclass(frozen=True)
class Hogwild(Exchanging):
    """Workers of one host update the same parameters in shared memory, with no locks and no waiting.

    Each worker steps with the optimizer's learning rate times its slice's share of the batch, so that the steps of all
    workers on one batch move the parameters as far as one step on the whole batch. Sparse gradients update only the
    rows that they contain. Each worker has its own optimizer state (momentum and the like). Workers wait for each other
    only at evaluations, checkpoints and the end.
    """

    promises = Traits()
    examples = ("hogwild", "hogwild + accumulate(4)")
    unplanned = "its workers write to shared memory without a lock, and send no messages"

    def check_hosts(self, hosts: int) -> None:
        """Refuse several hosts."""
        if hosts > 1:
            raise StrategyError(
                f"hogwild keeps the parameters in memory that all workers share, and {hosts} hosts share none. Put all "
                f"workers on one host, or use a strategy that sends messages: downpour (which does not wait either) or "
                f"allreduce."
            )

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: parameters in shared memory, and weighted steps."""
        if group.size > 1 and not group.direct.shares_memory:
            raise StrategyError(
                "hogwild needs workers that share memory: on one host, on CPUs. These do not. Start all of them on one "
                "host, or use allreduce, which works between hosts."
            )
        return HogwildWorker(group, stopwatch)


class HogwildWorker(Exchange):
    """Steps on shared parameters, with steps weighted by its share of the batch."""

    replicated = False
    acts_in_steps = True
    unpredicted = "workers write to shared memory, and exchange nothing"

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        super().__init__(group, stopwatch)
        self._shared: list[Parameter] = []
        self._known: set[int] = set()
        self._share = 1 / group.size
        self._clocks: _Clocks | None = None
        self._stale: Counter[int] = Counter()
        self._written = self._pending = 0
        self._restore_rates: Callable[[], None] | None = None
        self._idle = Idle()
        self._recorder = RECORDER.get()

    @property
    def lockstep(self) -> bool:
        """No worker waits for another."""
        return False

    def install(self, model: nn.Module) -> None:
        """Move the model's parameters into shared memory."""
        if self._clocks is None:
            self._clocks = _Clocks(self.group.direct.shared_segment(LINE * self.group.size, SHARING), self.group)
        new = [p for p in model.parameters() if id(p) not in self._known and p.numel()]
        new = [p for p in new if p.is_floating_point() or p.is_complex()]
        self._known.update(map(id, new))
        self._shared += new
        share_parameters(new, self.group)

    def attend(self, optimizer: Optimizer) -> None:
        """Weigh this optimizer's steps; refuse optimizers that are not elementwise."""
        if self.group.size == 1:
            return
        if type(optimizer) not in OPTIMIZERS:
            names = ", ".join(kind.__name__ for kind in OPTIMIZERS)
            raise StrategyError(
                f"hogwild cannot be used with {type(optimizer).__name__}: it may read whole parameters at once, "
                f"which others are changing, or take steps that do not follow its learning rate. It works with those "
                f"that treat every number by itself: {names}. Use allreduce."
            )
        self._hook_steps(optimizer, self._before_step, self._after_step)

    def weigh(self, examples: int, total: int | None) -> None:
        """Weigh the coming step by its share of the batch; equally if the whole is unknown."""
        if total:
            self._share = examples / total
        else:
            self._share = 1 / self.group.size if examples else 0.0
        self._begin()

    def suspend(self, held: bool) -> None:
        """Gradients are local anyway; a suspended step finds none."""
        del held
        self._begin()

    def _begin(self) -> None:
        if self._clocks is not None:
            self._clocks.read()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_closure("hogwild", args, kwargs)
        if self._share == 0:
            self._idle.hide(optimizer)
            return
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        # A step writes all of a parameter, or the rows of a sparse gradient.
        self._pending = sum((gradient._values() if gradient.is_sparse else gradient).nbytes for gradient in gradients)
        self._restore_rates = scale_rates(optimizer, self._share)

    def _after_step(self, *_: Any) -> None:
        if self._restore_rates is not None:
            self._restore_rates()
        self._idle.restore()
        if self._pending and self._clocks is not None:
            self._written += self._pending
            staleness = self._clocks.written()
            self._stale[min(staleness, MOST_STALE)] += 1
            if self._recorder is not None:
                name = self._recorder.name(_SHARED, lambda: About(_SHARED, "read"))
                self._recorder.stamp(_READ, name, self._stale.total(), self._recorder.steps, staleness)
        self._pending, self._restore_rates = 0, None

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, no worker steps, so that all see the same parameters; buffers are the workers' mean."""
        self._meet("the start of an evaluation")
        with averaged_buffers(models, self.group):
            yield
        self._meet("the end of an evaluation")

    def _meet(self, what: str) -> None:
        if self.group.size > 1:
            with self.stopwatch.spent_on("wait"):
                self.group.barrier(what)

    def payload(self) -> int:
        """Bytes that this worker's steps have written into shared parameters."""
        return self._written

    def staleness(self, steps: int) -> dict[str, int]:
        """Updates of others between a worker's read of the parameters and its update, over all workers."""
        if self.group.size == 1:
            return {"0": steps}
        oldest = int(self.group.gather([float(max(self._stale, default=0))], "the count of staleness").max())
        row = [float(self._stale[age]) for age in range(oldest + 1)]
        counts = self.group.gather(row, "the count of staleness").sum(dim=0).tolist()
        return {str(age): int(count) for age, count in enumerate(counts) if count}

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"written": self._written, "stale": {str(age): count for age, count in self._stale.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts, and wait until all workers have restored the shared parameters."""
        self._written = int(state["written"])
        self._stale = Counter({int(age): int(count) for age, count in state["stale"].items()})
        self._meet("the return to a checkpoint")

    def close(self) -> None:
        """Remove the hooks, and give every worker a private copy of the parameters."""
        super().close()
        for parameter in self._shared:
            parameter.data = parameter.data.clone()
        self._clocks = None


class _Clocks:
    """Counts of updates in shared memory. Each worker writes only its own, so that no count is lost."""

    def __init__(self, segment: Segment, group: Group) -> None:
        words: Any = segment.array(0, segment.size // 8, np.int64)
        self._words: memoryview = memoryview(words)
        places = [rank * LINE // 8 for rank in range(group.size)]
        self._mine = places.pop(group.rank)
        self._others = places
        self._seen = 0
        self._waiting = False

    def read(self) -> None:
        """A batch begins; of several batches before one update, the first counts."""
        if not self._waiting:
            self._waiting = True
            self._seen = self._elsewhere()

    def written(self) -> int:
        """An update is done; returns the number of updates by others since the batch began."""
        self._words[self._mine] += 1
        now = self._elsewhere()
        staleness, self._seen, self._waiting = now - self._seen, now, False
        return staleness

    def _elsewhere(self) -> int:
        words = self._words
        return sum([words[place] for place in self._others])

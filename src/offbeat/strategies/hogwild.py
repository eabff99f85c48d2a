"""Workers of one host update the same parameters, with no locks and without waiting for each other.

The parameters lie once in shared memory. Every worker computes gradients on its slice of each batch and lets its own
optimizer change the shared parameters at once. Where gradients are sparse, two workers seldom touch the same number;
where they do, an update may be lost, or be computed from parameters that another has half changed.

Niu, Recht, Ré and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent" (2011).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor, nn, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.events.recorder import RECORDER, About, Mark
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies._base import Traits
from offbeat.strategies.worker.exchange import Exchange, Exchanging, averaged_buffers, closure_of
from offbeat.strategies.worker.flat_rows import LINE, SHARING, Idle, share_parameters

OPTIMIZERS: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.SparseAdam, optim.Adagrad),
    *(optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam),
)
"""Optimizers that treat every number by itself, and whose steps are as long as their learning rate says."""
MOST_STALE: Final = 1000
"""What is more updates old than this is counted as this old."""
_SHARED: Final = "shared parameters"
"""The group of events that are about them."""
_READ: Final = int(Mark.READ)


@dataclass(frozen=True)
class Hogwild(Exchanging):
    """Workers of one host update the same parameters in shared memory, with no locks and no waiting.

    Each worker steps with the optimizer's learning rate times its slice's share of the batch, so that the steps of all
    workers on one batch move the parameters as far as one step on the whole batch. Sparse gradients change only the
    rows that they name. The optimizer's own state (momentum and the like) is each worker's own. Workers wait for each
    other only at evaluations, checkpoints and the end.
    """

    promises = Traits()
    examples = ("hogwild", "hogwild + accumulate(4)")
    unplanned = "its workers write to shared memory without a lock, and send nobody anything"

    def check_hosts(self, hosts: int) -> None:
        """Refuse several hosts."""
        if hosts > 1:
            raise StrategyError(
                f"hogwild keeps the parameters in memory that all workers share, and {hosts} hosts share none. Put all "
                f"workers on one host, or take one that sends messages: downpour (as free of waiting) or allreduce."
            )

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: parameters in shared memory, and steps that are weighed."""
        if group.size > 1 and not group.direct.shares_memory:
            raise StrategyError(
                "hogwild needs workers that share memory: on one host, on CPUs. These do not. Start all of them on one "
                "host, or take allreduce, which works between hosts."
            )
        return _Unlocked(group, stopwatch)


class _Unlocked(Exchange):
    replicated = False
    acts_in_steps = True
    unforeseen = "workers write to shared memory, and exchange nothing"

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        super().__init__(group, stopwatch)
        self._shared: list[Parameter] = []
        self._known: set[int] = set()
        self._share = 1 / group.size
        self._clocks: _Clocks | None = None
        self._stale: Counter[int] = Counter()
        self._written = self._pending = 0
        self._rates: list[tuple[dict[str, Any], Any]] = []
        self._idle = Idle()
        self._recorder = RECORDER.get()

    @property
    def lockstep(self) -> bool:
        """Nobody waits for anybody."""
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
        """Weigh this optimizer's steps; refuse one whose steps cannot be taken number by number."""
        if self.group.size == 1:
            return
        if type(optimizer) not in OPTIMIZERS:
            names = ", ".join(kind.__name__ for kind in OPTIMIZERS)
            raise StrategyError(
                f"hogwild cannot be used with {type(optimizer).__name__}: it may look at whole parameters at once, "
                f"which others are changing, or take steps that do not follow its learning rate. It works with those "
                f"that treat every number by itself: {names}. Use allreduce."
            )
        self.handles.append(optimizer.register_step_pre_hook(self._before_step))
        self.handles.append(optimizer.register_step_post_hook(self._after_step))

    def weigh(self, examples: int, total: int | None) -> None:
        """The coming step counts by its share of the batch; equally if nobody knows the whole."""
        if total:
            self._share = examples / total
        else:
            self._share = 1 / self.group.size if examples else 0.0
        self._begin()

    def suspend(self, held: bool) -> None:
        """Gradients are local anyway; a step that is held finds none."""
        del held
        self._begin()

    def _begin(self) -> None:
        if self._clocks is not None:
            self._clocks.read()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            raise StrategyError("hogwild cannot be used with optimizer.step(closure). Use allreduce.")
        if self._share == 0:
            self._idle.hide(optimizer)
            return
        self._pending = sum(_bytes_of(p.grad) for group in optimizer.param_groups for p in group["params"])
        for group in optimizer.param_groups:
            self._rates.append((group, group["lr"]))
            group["lr"] = group["lr"] * self._share

    def _after_step(self, *_: Any) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._idle.restore()
        if self._pending and self._clocks is not None:
            self._written += self._pending
            late = self._clocks.written()
            self._stale[min(late, MOST_STALE)] += 1
            self._note(late)
        self._pending = 0
        self._rates.clear()

    def _note(self, late: int) -> None:
        """In a run that is watched: what this update was computed from was so many updates of others old."""
        if self._recorder is not None:
            name = self._recorder.name(_SHARED, lambda: About(_SHARED, "read"))
            self._recorder.stamp(_READ, name, self._stale.total(), self._recorder.steps, late)

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Inside, nobody steps, so that all see the same parameters; buffers are the workers' mean."""
        self._meet("the start of an evaluation")
        with averaged_buffers(models, self.group):
            yield
        self._meet("the end of an evaluation")

    def _meet(self, what: str) -> None:
        if self.group.size > 1:
            with self.stopwatch.spent_on("wait"):
                self.group.barrier(what)

    def payload(self) -> int:
        """What this worker's steps have written into shared parameters."""
        return self._written

    def staleness(self, steps: int) -> dict[str, int]:
        """How many updates of others fell between a worker's reading of parameters and its update, over all workers."""
        if self.group.size == 1:
            return {"0": steps}
        oldest = int(self.group.gather([float(max(self._stale, default=0))], "the count of staleness").max())
        row = [float(self._stale[age]) for age in range(oldest + 1)]
        counts = self.group.gather(row, "the count of staleness").sum(dim=0).tolist()
        return {str(age): int(count) for age, count in enumerate(counts) if count}

    def state_dict(self) -> dict[str, Any]:
        """What was counted."""
        return {"written": self._written, "stale": {str(age): count for age, count in self._stale.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting, and let nobody step before all have put back the parameters that they share."""
        self._written = int(state["written"])
        self._stale = Counter({int(age): int(count) for age, count in state["stale"].items()})
        self._meet("the return to a checkpoint")

    def close(self) -> None:
        """Take the hooks off, and give every worker its own parameters again."""
        super().close()
        for parameter in self._shared:
            parameter.data = parameter.data.clone()
        self._clocks = None


class _Clocks:
    """How many updates each worker has done, where all can see it. Each writes only its own, so that none is lost."""

    def __init__(self, segment: Segment, group: Group) -> None:
        words: Any = segment.array(0, segment.size // 8, np.int64)
        self._words: memoryview = memoryview(words)
        places = [rank * LINE // 8 for rank in range(group.size)]
        self._mine = places.pop(group.rank)
        self._others = places
        self._seen = 0
        self._waiting = False

    def read(self) -> None:
        """A batch begins. Of several before one update, the first counts."""
        if not self._waiting:
            self._waiting = True
            self._seen = self._elsewhere()

    def written(self) -> int:
        """An update is done; answers how many others were done since the batch began."""
        self._words[self._mine] += 1
        now = self._elsewhere()
        late, self._seen, self._waiting = now - self._seen, now, False
        return late

    def _elsewhere(self) -> int:
        words = self._words
        return sum([words[place] for place in self._others])


def _bytes_of(gradient: Tensor | None) -> int:
    """What a step on this gradient writes: all of a parameter, or the rows that a sparse gradient names."""
    if gradient is None:
        return 0
    held = gradient._values() if gradient.is_sparse else gradient
    return held.numel() * held.element_size()

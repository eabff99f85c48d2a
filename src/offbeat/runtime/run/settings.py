"""The settings of a run, resolved, and the orders of each worker, where a script's `offbeat.init()` finds them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat import limits
from offbeat.errors import OffbeatError, UsageError
from offbeat.protocols.placement import AUTO
from offbeat.settings import option

if TYPE_CHECKING:
    from offbeat.protocols.causality.delivery_rule import DeliveryRule
    from offbeat.protocols.disturbances import Disturbance
    from offbeat.runtime.data_servers.plan import DataServerPlan
    from offbeat.runtime.servers.plan import ServerPlan


@dataclass(frozen=True)
class Target:
    """The score at which a run is done."""

    value: float
    name: str | None = None  # The metric's name in `team.report`; None: the only one.
    lower: bool = False  # Whether lower is better.

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `0.97`, `accuracy=0.97`, `accuracy>=0.97` or `loss<=0.1`."""
        match = re.fullmatch(r"\s*(?:([A-Za-z_]\w*)\s*(=|>=|<=|>|<)\s*)?([-+0-9.eE]+)\s*", text)
        try:
            value = float(match[3]) if match else math.nan
        except ValueError:
            value = math.nan
        if match is None or not math.isfinite(value):
            raise UsageError(
                f"--target {text!r} is not a target. Say a number, or a metric and a number: accuracy=0.97, loss<=0.1."
            )
        return cls(value, match[1], (match[2] or "=").startswith("<"))

    def __str__(self) -> str:
        sign = "<=" if self.lower else "="
        return f"{self.name}{sign}{self.value:.15g}" if self.name else f"{self.value:.15g}"

    def pick(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """The metric to judge; None if it was not reported this time."""
        if self.name is not None:
            return (self.name, metrics[self.name]) if self.name in metrics else None
        if len(metrics) > 1:
            names = ", ".join(metrics)
            raise UsageError(
                f"the target {self.value:g} does not say which metric it means of {names}. Say e.g. "
                f"{next(iter(metrics))}={self.value:g}."
            )
        return next(iter(metrics.items()), None)

    def reached(self, value: float) -> bool:
        """Whether this value is good enough."""
        return value <= self.value if self.lower else value >= self.value


OBSERVED = "Monitoring"
RECOVERY = "Faults and checkpoints"
ADVANCED = "Advanced"


@dataclass(frozen=True)
class Goal:
    """The options of `offbeat run`, and those that measuring commands add to them."""

    strategy: str | None = option(
        None, "Strategy, e.g. [bold]allreduce + accumulate(4)[/bold]; see `offbeat strategies`.", "-s"
    )
    target: str | None = option(
        None,
        "Stop at this score: [bold]0.97[/bold]; in scripts [bold]accuracy=0.97[/bold] or [bold]loss<=0.1[/bold].",
        "-t",
    )
    epochs: int | None = option(None, "Maximum epochs.")
    steps: int | None = option(None, "Maximum steps.")
    seed: int | None = option(None, "Random seed: initial model, order of the data, dropout.")
    device: str = option("cpu", "Device to train on; only cpu is tested.", panel=ADVANCED)
    backend: str = option(
        "gloo",
        "Backend used when the script, or a framework in it, asks torch.distributed for Gloo: Gloo itself, or our "
        "shared-memory backend.",
        metavar="gloo|offbeat",
        panel=ADVANCED,
    )
    parts: str = option(
        "iid", "How training data is split: iid, or skewed by label with dirichlet(alpha).", panel=ADVANCED
    )
    checkpoint_every: int | None = option(
        None, "Steps between checkpoints. Default: at evaluations, using at most 5 % of the time.", panel=RECOVERY
    )
    timeout: float = option(600.0, "Longest wait for another worker, in seconds.", panel=RECOVERY)
    tensorboard: bool = option(False, "Also write TensorBoard files to the run folder.", panel=OBSERVED)
    replace: int = option(
        0,
        "Number of dead workers to replace; new ones join at the next evaluation. For strategies with servers.",
        panel=RECOVERY,
    )
    disturb: tuple[str, ...] = option(
        (),
        "Inject a fault: [bold]worker 1: pause 200ms every 1s[/bold], [bold]worker 2: kill at step 50[/bold]. "
        "Repeatable.",
        metavar="FAULT",
        panel=RECOVERY,
    )
    watch: bool = option(
        False,
        "Record who waits for whom, for `offbeat explain`, and serve a live page. A run that can never finish is "
        "stopped with the reason and its own exit code: 10 deadlock, 11 mismatched calls, 12 a wait for a worker "
        "that has ended.",
        name="monitor",
        panel=OBSERVED,
    )
    data_servers: int = option(
        0,
        "Processes apart from the workers that read, decode and collate the training examples ahead of need. See "
        "docs/data.md.",
        panel=ADVANCED,
    )
    delivery: str = option(
        "vector",
        "Order in which --monitor judges events: by [bold]vector[/bold] clocks; by [bold]lamport[/bold] clocks, with "
        "probes of silent processes; by [bold]time[/bold], if clocks agree and no event takes longer than a bound; or "
        "[bold]fifo[/bold], as they come. Verdicts are reached on consistent cuts only.",
        metavar="vector|lamport|time|fifo",
        panel=OBSERVED,
    )
    delivery_bound: float | None = option(
        None,
        "Seconds: for `time`, how long an event may take (0.05 by default); for `lamport`, how long a process may be "
        "silent before it is probed (0.2); for `vector`, how long a cause may be missing (2).",
        metavar="SECONDS",
        panel=OBSERVED,
    )
    placement: str = option(
        AUTO,
        "Which workers share a split replica: [bold]auto[/bold] keeps ways, then stages, on one host; "
        "[bold]ranks[/bold] takes workers in order; or all workers, e.g. [bold]0,2,1,3[/bold], by replica, stage and "
        "way.",
        metavar="auto|ranks|WORKERS",
        panel=ADVANCED,
    )
    rate_factor: float = option(1.0, "Multiply every learning rate, after any schedulers.", panel=ADVANCED)
    check_finite: bool = True
    """Whether a NaN or infinite gradient stops the run."""
    merge: int = 1
    """Batches of the training loader merged into one: weak scaling gives every worker a whole batch."""
    gauge: int | None = None
    """Passes over single examples that check the measured gradient noise; None: noise is not measured."""

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "checkpoint_every", "gauge"):
            value = getattr(self, name)
            if value is not None:
                limits.whole(f"--{name.replace('_', '-')}", value, limits.COUNT, least=0 if name == "gauge" else 1)
        limits.whole("--merge", self.merge, limits.MERGED)
        limits.whole("--data-servers", self.data_servers, limits.DATA_SERVERS, least=0, why="each is a process")
        limits.whole("--replace", self.replace, limits.REPLACEMENTS, least=0)
        if self.seed is not None:
            limits.seed("--seed", self.seed)
        limits.above_zero("--rate-factor", self.rate_factor)
        limits.seconds("--timeout", self.timeout)
        if self.target is not None:
            Target.parse(self.target)
        from offbeat.runtime.data.label_skew import Parts  # Needs torch.

        Parts.parse(self.parts)
        _ = self.delivery_rule
        if self.backend not in ("gloo", "offbeat"):
            raise UsageError(f"--backend {self.backend!r} is not a backend. Say gloo or offbeat.")
        if self.backend == "offbeat" and self.device != "cpu":
            raise UsageError(f"--backend offbeat is for tensors on the CPU, not on {self.device}. Omit it.")
        _check_device(self.device)
        object.__setattr__(self, "disturb", tuple(self.disturb))  # JSON has only lists.
        _ = self.disturbances

    @property
    def disturbances(self) -> list[Disturbance]:
        """The faults to inject, parsed."""
        from offbeat.protocols.disturbances import parse  # Needs numpy, which would slow down `offbeat --help`.

        return [parse(sentence) for sentence in self.disturb]

    @property
    def delivery_rule(self) -> DeliveryRule:
        """The order in which the monitor judges events."""
        from offbeat.protocols.causality.delivery_rule import DeliveryRule

        return DeliveryRule(self.delivery, self.delivery_bound)

    def without_effect(self) -> list[str]:
        """The options given that have no effect on a script that never joins a team."""
        names = ("strategy", "target", "epochs", "steps", "checkpoint_every", "parts", "replace", "disturb")
        changed = [name for name in (*names, "rate_factor") if getattr(self, name) != getattr(Goal, name)]
        return [f"--{name.replace('_', '-')}" for name in changed]

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Goal:
        """From JSON data; entries of other versions are ignored."""
        import msgspec

        try:
            return msgspec.convert(dict(data), cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"these are not the settings of a run: {error}. The file was changed.") from error


@dataclass(frozen=True)
class Assignment:
    """One worker's part in a run."""

    goal: Goal = field(default_factory=Goal)  # The settings of the run.
    folder: Path | None = None  # The run folder; None leaves nothing on disk.
    resume: bool = False  # Whether to resume from the newest checkpoint of the folder.
    joins: bool = False  # Whether this worker joins a team that has already started.
    disturbed: tuple[int, ...] = ()  # Numbers of the `--disturb` faults that already fired for the worker it replaces.
    identity: Mapping[str, Any] = field(default_factory=dict)  # What a checkpoint must match to be resumed from.
    send: Callable[[Mapping[str, Any]], None] = lambda _message: None  # Sends progress to the launcher.
    fail: Callable[[OffbeatError], None] | None = None
    """Reports a fatal error to the launcher, from any thread; None without a launcher of ours."""
    servers: ServerPlan | None = None  # The run's parameter servers, if its strategy has any.
    data_servers: DataServerPlan | None = None  # The processes that prepare this run's batches, if there are any.
    offer: Callable[[Any], Any] | None = None
    """In a data server, what takes the loaders that a script prepares, instead of a team."""
    machines: tuple[int, ...] = ()
    """The machine of each worker, where machines share no files; empty where all workers write to one folder."""
    open_teams: list[Any] = field(default_factory=list)
    """Teams that the script has opened; any it leaves open are closed for it."""


ASSIGNED: ContextVar[Assignment | None] = ContextVar("offbeat assignment", default=None)
"""Set by offbeat's launcher in each worker before a script starts."""


def _check_device(text: str) -> None:
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise UsageError(f"--device {text!r} is not a device. Say cpu, or cuda where there is a GPU.") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {text} cannot be trained on: offbeat knows cpu, and cuda where there is a GPU.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {text} was requested, but this machine's torch has no CUDA. Use --device cpu.")

"""Reporting of a run: progress and cost so far, metrics averaged over the workers, messages, and the result."""

from __future__ import annotations

import hashlib
import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import NonFiniteError, UsageError
from offbeat.protocols.partition import mixed
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.folder import METRICS_FILE, MetricsWriter
from offbeat.runtime.run.settings import Target
from offbeat.runtime.run.stopwatch import Stopwatch

KEPT = "Training stops before it can spread; the last checkpoint is from before. A lower learning rate often helps."
"""The end of every error about NaN or infinity."""
_PROGRESS_EVERY = 0.1  # Seconds between progress messages to the launcher.


def cpu_seconds() -> float:
    """Processor time of this process and of the children it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass
class Ledger:
    """One worker's record of a run; the same on all workers except for `own_samples` and processor time."""

    target: Target | None
    steps: int = 0
    samples: int = 0  # Training examples over all workers, as far as every worker knows.
    own_samples: int = 0  # This worker's examples from batches whose total size no single worker knows.
    score: float | None = None
    best_score: float | None = None
    reached: bool = False
    seconds_to_target: float | None = None
    reports: int = 0  # Number of reports so far.
    metrics: dict[str, float] = field(default_factory=dict)
    earlier_cpu_seconds: float = 0.0  # Processor time of earlier parts of a resumed run.
    _cpu_start: float = field(default_factory=cpu_seconds)

    def judge(self, metrics: Mapping[str, float], seconds: float) -> bool:
        """Record a report; returns whether the target is reached, now or before."""
        self.metrics = dict(metrics)
        self.reports += 1
        judged = self.target.pick(metrics) if self.target else (next(iter(metrics.items())) if metrics else None)
        if judged is not None:
            self.score = judged[1]
            better = max if not (self.target and self.target.lower) else min
            self.best_score = judged[1] if self.best_score is None else better(self.best_score, judged[1])
            if self.target is not None and not self.reached and self.target.reached(judged[1]):
                self.reached = True
                self.seconds_to_target = seconds
        return self.reached

    def cpu(self) -> float:
        """Processor time of this worker in the run."""
        return self.earlier_cpu_seconds + cpu_seconds() - self._cpu_start

    def summary(self) -> dict[str, Any]:
        """Its part of the result."""
        return {
            "steps": self.steps,
            "score": self.score,
            "best_score": self.best_score,
            "metrics": self.metrics,
            "target": None if self.target is None else str(self.target),
            "reached_target": self.reached if self.target else None,
            "seconds_to_target": self.seconds_to_target,
        }

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        names = [f.name for f in fields(self) if f.name not in ("target", "earlier_cpu_seconds", "_cpu_start")]
        return {name: getattr(self, name) for name in names} | {"cpu_seconds": self.cpu(), "target": str(self.target)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. A different target counts as not reached yet."""
        for name, value in state.items():
            if name not in ("cpu_seconds", "target"):
                setattr(self, name, value)
        if state["target"] != str(self.target):
            self.reached, self.seconds_to_target = False, None
        self.earlier_cpu_seconds = float(state["cpu_seconds"])
        self._cpu_start = cpu_seconds()


class Reports:
    """One worker's side of a run's reporting."""

    def __init__(self, group: Group, ledger: Ledger, stopwatch: Stopwatch, send: Callable[[Mapping[str, Any]], None]):
        self._group, self._ledger, self._stopwatch, self._send = group, ledger, stopwatch, send
        self._metrics: MetricsWriter | None = None
        self._open_metrics: Callable[[], MetricsWriter] | None = None
        self._last_progress = 0.0
        self.evaluated = 0
        """Examples this worker has read without gradients since the last report: its weight in the next."""
        self.last_loss: float | None = None  # The loss of the latest step here, if the loop reports it.
        self.figures: Callable[[], Mapping[str, Any]] = dict
        """The strategy's figures for this worker, for metrics and display."""
        self.accounts: Callable[[], Mapping[str, Any]] = dict
        """The strategy's figures for all workers, for metrics; a collective call."""
        self.evidence: Callable[[], Sequence[float]] = tuple
        """Numbers that expose workers with identical data or diverged models; the same count everywhere."""
        self.compare: Callable[[Tensor], None] = lambda _rows: None  # Gets those numbers of all workers, a row each.
        self.payload: Callable[[], int] = int  # Bytes this worker has sent outside the group.
        self._earlier_payload = 0  # Bytes of earlier parts of a resumed run that `payload` does not count.

    def write_to(self, folder: Path | None, tensorboard: bool) -> None:
        """Let worker 0, or the leader after its death, also write metrics into the run folder."""
        if folder is not None:

            def open_metrics() -> MetricsWriter:
                folder.mkdir(parents=True, exist_ok=True)
                return MetricsWriter(folder / METRICS_FILE, folder / "tensorboard" if tensorboard else None)

            self._open_metrics = open_metrics
            if self._group.membership.leads:
                self._metrics = self._open_metrics()

    def go_back(self) -> None:
        """Drop metrics written after the checkpoint that the run resumes from."""
        if self._metrics is not None:
            self._metrics.keep_first(self._ledger.reports)

    def finite(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """The values as numbers; NaN and infinity are refused."""
        values = {k: float(v.detach() if isinstance(v, Tensor) else v) for k, v in metrics.items()}
        bad = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(
                f"worker {self._group.rank} reported {', '.join(bad)} after step {self._ledger.steps}. {KEPT}"
            )
        return values

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Values averaged over the workers, weighted by examples evaluated (equally if none)."""
        names = sorted(values)
        # Not Python's own hash, which differs between processes.
        hashes = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
        fingerprint = float(mixed(len(names), *(int.from_bytes(value, "little") for value in hashes)) % 2**52)
        rows = self._group.gather([fingerprint, *self.evidence()], "a report")
        self.compare(rows[:, 1:])
        if not bool((rows[:, 0] == rows[0, 0]).all()):
            own = ", ".join(names) or "none"
            raise UsageError(f"the workers report different metrics; worker {self._group.rank} has {own}.")
        evaluated, self.evaluated = self.evaluated, 0
        if not names:
            return {}
        # Weights travel with the values: a worker that has died since the rows above has neither.
        table = self._group.gather([float(evaluated), *(values[name] for name in names)], "a report")
        weights = table[:, :1] if table[:, 0].sum() > 0 else torch.ones_like(table[:, :1])
        mean = ((table[:, 1:] * weights).sum(0) / weights.sum()).tolist()
        return {name: mean[names.index(name)] for name in values}

    def record(self, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Write a metrics line and tell the launcher, on the leader; a collective call."""
        accounts = self.accounts()
        if not self._group.membership.leads:
            return
        progress = self._progress(epoch)
        if self._metrics is None and self._open_metrics is not None:
            self._metrics = self._open_metrics()
        if self._metrics is not None:
            names = ("step", "epoch", "samples", "seconds", "seconds_by_kind", "bytes_sent", *self.figures())
            loss = {} if self.last_loss is None else {"loss": self.last_loss}
            self._metrics.append({name: progress[name] for name in names} | dict(accounts) | loss | dict(metrics))
        self._send({"kind": "report", "metrics": dict(metrics), **progress})

    def tell(self, epoch: int | None) -> None:
        """Send progress to the launcher, from the leader, at most ten times a second."""
        now = time.monotonic()
        if self._group.membership.leads and now - self._last_progress >= _PROGRESS_EVERY:
            self._last_progress = now
            self._send({"kind": "progress", **self._progress(epoch)})

    def disturbed(self, number: int) -> None:
        """Tell the launcher that an injected fault has fired: the number of its sentence."""
        self._send({"kind": "disturbed", "number": number})

    def _progress(self, epoch: int | None) -> dict[str, Any]:
        return {
            "step": self._ledger.steps,
            "epoch": epoch,
            "samples": self._ledger.samples + self._ledger.own_samples * self._group.size,
            "seconds": round(self._stopwatch.total(), 6),
            "seconds_by_kind": {kind: round(spent, 6) for kind, spent in self._stopwatch.seconds.items()},
            "bytes_sent": self._sent(),
            "loss": self.last_loss,
            **self.figures(),
        }

    def _sent(self) -> int:
        return self._group.bytes_sent + self._earlier_payload + self.payload()

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs beside the state of the group and the ledger."""
        return {"payload": self._earlier_payload + self.payload()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint; after the exchange, which may restore its own count."""
        self._earlier_payload = int(state["payload"]) - self.payload()

    def conclude(self, more: Mapping[str, Any]) -> None:
        """Gather all workers' figures and send the result from the leader; a collective call."""
        self._stopwatch.total()
        own = [self._sent(), self._ledger.cpu(), self._ledger.own_samples, self._group.sent.totals.measured]
        row = [*map(float, own), self._stopwatch.overlapped, *self._stopwatch.seconds.values()]
        rows = self._group.gather(row, "the end of the run")
        if self._group.membership.leads:
            self._send({"kind": "result", **self._ledger.summary(), **self._costs(rows), **more})

    def _costs(self, rows: Tensor) -> dict[str, Any]:
        mean = rows.mean(dim=0)
        kinds: list[str] = list(self._stopwatch.seconds)
        by_kind = {kind: float(mean[5 + i]) for i, kind in enumerate(kinds)}
        # What each worker does by itself, evaluations aside.
        computing = rows[:, [5 + kinds.index(kind) for kind in ("input", "compute", "other")]].sum(dim=1)
        seconds = sum(by_kind.values())
        samples = self._ledger.samples + int(rows[:, 2].sum())
        return {
            "samples": samples,
            "seconds": seconds,
            "samples_per_second": samples / seconds if seconds > 0 else 0.0,
            "core_seconds": float(rows[:, 1].sum()),
            "bytes_sent": int(rows[:, 0].sum()),
            "bytes_measuring": int(rows[:, 3].sum()),
            "seconds_by_kind": by_kind,
            "overlapped_seconds": float(mean[4]),
            "computing_seconds": computing.tolist(),
            "waits": rows[:, 5 + kinds.index("wait")].tolist(),
        }

"""What workers say of a run while it goes, and at its end: metrics agreed by all, progress, and the result."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import NonFiniteError, UsageError
from offbeat.protocols.partition import mixed
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.folder import METRICS_FILE, MetricsWriter
from offbeat.runtime.run.progress import Ledger
from offbeat.runtime.run.stopwatch import Stopwatch

KEPT = "Training stops before it can spread; the last checkpoint is from before. A lower learning rate often helps."
"""The end of every message about a number that is not finite."""
_TELL_EVERY = 0.1
"""Seconds between two messages to the launcher about how far the work is."""


class Reports:
    """One worker's side of all that is said about a run."""

    def __init__(self, group: Group, ledger: Ledger, stopwatch: Stopwatch, send: Callable[[Mapping[str, Any]], None]):
        self._group, self._ledger, self._stopwatch, self._send = group, ledger, stopwatch, send
        self._metrics: MetricsWriter | None = None
        self._open_metrics: Callable[[], MetricsWriter] | None = None
        self._told = 0.0
        self.evaluated = 0
        """Examples that this worker has read without gradients since the last report: its weight in the next."""
        self.last_loss: float | None = None
        """The loss of the latest step here, if the loop says it."""
        self.figures: Callable[[], Mapping[str, Any]] = dict
        """What the strategy has to say of this worker so far, for metrics and display."""
        self.accounts: Callable[[], Mapping[str, Any]] = dict
        """What the strategy has to say of all workers so far, for metrics; all call it together."""
        self.evidence: Callable[[], Sequence[float]] = tuple
        """Numbers by which workers that do the same, or that have drifted apart, are found; equally many everywhere."""
        self.compare: Callable[[Tensor], None] = _ignore
        """Is told those numbers of all workers, a row for each."""
        self.payload: Callable[[], int] = int
        """Bytes that this worker has sent outside of the group so far."""
        self._earlier_payload = 0
        """Those that it had sent in earlier parts of a resumed run, and that `payload` does not count."""

    def write_to(self, folder: Path | None, tensorboard: bool) -> None:
        """Worker 0 also writes metrics into the run's folder; should it die, the one who then leads does."""
        if folder is not None:
            self._open_metrics = lambda: _metrics_in(folder, tensorboard)
            if self._group.membership.leads:
                self._metrics = self._open_metrics()

    def go_back(self) -> None:
        """The run goes on from an earlier point: forget what was written after it."""
        if self._metrics is not None:
            self._metrics.keep_first(self._ledger.reports)

    def finite(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """The values as numbers; what is not finite is refused."""
        values = {k: float(v.detach() if isinstance(v, Tensor) else v) for k, v in metrics.items()}
        bad = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(
                f"worker {self._group.rank} reported {', '.join(bad)} after step {self._ledger.steps}. {KEPT}"
            )
        return values

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Values averaged over the workers, weighted by the examples that each has evaluated (equally if none)."""
        names = sorted(values)
        fingerprint = float(mixed(len(names), *(_hash(name) for name in names)) % 2**52)
        rows = self._group.gather([fingerprint, *self.evidence()], "a report")
        self.compare(rows[:, 1:])
        if not bool((rows[:, 0] == rows[0, 0]).all()):
            said = ", ".join(names) or "none"
            raise UsageError(f"the workers report different metrics; worker {self._group.rank} has {said}.")
        evaluated, self.evaluated = self.evaluated, 0
        if not names:
            return {}
        # Weights come with the values: a worker that has died since the rows above has neither.
        table = self._group.gather([float(evaluated), *(values[name] for name in names)], "a report")
        weights = table[:, :1] if table[:, 0].sum() > 0 else torch.ones_like(table[:, :1])
        mean = ((table[:, 1:] * weights).sum(0) / weights.sum()).tolist()
        return {name: mean[names.index(name)] for name in values}

    def record(self, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Worker 0 writes a line and tells the launcher; all workers call this together."""
        accounts = self.accounts()
        if not self._group.membership.leads:
            return
        far = self._how_far(epoch)
        if self._metrics is None and self._open_metrics is not None:
            self._metrics = self._open_metrics()
        if self._metrics is not None:
            told = ("step", "epoch", "samples", "seconds", "seconds_by_kind", "bytes_sent", *self.figures())
            loss = {} if self.last_loss is None else {"loss": self.last_loss}
            self._metrics.append({name: far[name] for name in told} | dict(accounts) | loss | dict(metrics))
        self._send({"kind": "report", "metrics": dict(metrics), **far})

    def tell(self, epoch: int | None) -> None:
        """Worker 0 tells the launcher how far the work is, a few times a second at most."""
        now = time.monotonic()
        if self._group.membership.leads and now - self._told >= _TELL_EVERY:
            self._told = now
            self._send({"kind": "progress", **self._how_far(epoch)})

    def _how_far(self, epoch: int | None) -> dict[str, Any]:
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
        """What the account must go on from after a resume, beside what the group and the ledger keep."""
        return {"payload": self._earlier_payload + self.payload()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint, after the exchange, which may count from where it was by itself."""
        self._earlier_payload = int(state["payload"]) - self.payload()

    def conclude(self, more: Mapping[str, Any]) -> None:
        """All workers bring their accounts together, and worker 0 sends the result."""
        self._stopwatch.total()
        counted = [float(self._sent()), self._ledger.cpu(), float(self._ledger.own_samples)]
        mine = [
            *counted,
            float(self._group.sent.totals.measured),
            self._stopwatch.overlapped,
            *self._stopwatch.seconds.values(),
        ]
        rows = self._group.gather(mine, "the end of the run")
        if self._group.membership.leads:
            self._send({"kind": "result", **self._ledger.summary(), **self._costs(rows), **more})

    def _costs(self, rows: Tensor) -> dict[str, Any]:
        mean = rows.mean(dim=0)
        by_kind = {kind: float(mean[5 + i]) for i, kind in enumerate(self._stopwatch.seconds)}
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
            "computing_seconds": self._computing(rows[:, 5:]).tolist(),
            "waits": rows[:, 5 + list(self._stopwatch.seconds).index("wait")].tolist(),
        }

    def _computing(self, kinds: Tensor) -> Tensor:
        """Each worker's seconds of what it does by itself, evaluations aside."""
        names: list[str] = list(self._stopwatch.seconds)
        return kinds[:, [names.index(kind) for kind in ("input", "compute", "other")]].sum(dim=1)


def _ignore(_: Tensor) -> None:
    """Nobody wants to know."""


def _metrics_in(folder: Path, tensorboard: bool) -> MetricsWriter:
    folder.mkdir(parents=True, exist_ok=True)
    return MetricsWriter(folder / METRICS_FILE, tensorboard=folder / "tensorboard" if tensorboard else None)


def _hash(text: str) -> int:
    """A number that is the same for the same text in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

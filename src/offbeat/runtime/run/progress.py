"""Progress and cost of a run so far: the numbers of its result."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from offbeat.runtime.run.settings import Target


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

"""Metrics of runs for Prometheus, by its own client library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from offbeat.runtime.run.folder import part

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
NAMES: Final = {
    "offbeat_run": "1, with the run's strategy, workers and state as labels.",
    "offbeat_step": "Updates done at the last report.",
    "offbeat_samples": "Training examples seen at the last report.",
    "offbeat_samples_per_second": "Examples per second between the last two reports.",
    "offbeat_metric": "The last reported value, by name: score, loss and others.",
    "offbeat_seconds": "Training time so far, by kind.",
    "offbeat_staleness_reads": "Reads so far, by how many steps old they were.",
    "offbeat_worker_steps": "Steps of each process, by its events.",
    "offbeat_worker_waiting_seconds": "How long each process has been waiting; 0 if it does not.",
    "offbeat_events": "Events recorded.",
    "offbeat_events_dropped": "Events overwritten before they were read.",
    "offbeat_verdict": "1 for each kind of verdict that holds.",
}  # Help text of each gauge.
_NOT_METRICS: Final = ("step", "epoch", "samples", "seconds")

Sample = tuple[str, dict[str, str], float]


def exposition(runs: Iterable[Mapping[str, Any]]) -> bytes:
    """All metrics of these runs, given as `RunView.summary` returns them."""
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for name, labels, value in (sample for run in runs for sample in _samples(run)):
        if name not in gauges:
            gauges[name] = Gauge(name, NAMES[name], labelnames=list(labels), registry=registry)
        gauges[name].labels(**labels).set(value)
    return generate_latest(registry)


def _samples(run: Mapping[str, Any]) -> Iterator[Sample]:
    label = {"run": str(run["name"])}
    workers, strategy = str(part(run, "config").get("workers")), str(run["strategy"])
    yield "offbeat_run", label | {"strategy": strategy, "workers": workers, "state": run["state"]}, 1
    yield from _reported(label, run["metrics"])
    yield "offbeat_events", label, run["events"]
    yield "offbeat_events_dropped", label, run["dropped"]
    for process in run["processes"]:
        if process.get("step") is not None:
            own = label | {"worker": process["name"]}
            yield "offbeat_worker_steps", own, process["step"]
            yield "offbeat_worker_waiting_seconds", own, process.get("seconds", 0.0)
    for kind in dict.fromkeys(verdict["kind"] for verdict in run["verdicts"]):
        yield "offbeat_verdict", label | {"kind": kind}, 1


def _reported(label: dict[str, str], lines: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
    if not lines:
        return
    last, before = lines[-1], lines[-2] if len(lines) > 1 else {"samples": 0, "seconds": 0.0}
    for name in ("step", "samples"):
        if _is_number(last.get(name)):
            yield f"offbeat_{name}", label, last[name]
    if all(_is_number(line.get(name)) for line in (last, before) for name in ("samples", "seconds")):
        seconds = last["seconds"] - before["seconds"]
        if seconds > 0:
            yield "offbeat_samples_per_second", label, (last["samples"] - before["samples"]) / seconds
    metrics = {name: value for name, value in last.items() if name not in _NOT_METRICS}
    for values, name, by in (
        (metrics, "offbeat_metric", "name"),
        (part(last, "seconds_by_kind"), "offbeat_seconds", "kind"),
        (part(last, "staleness"), "offbeat_staleness_reads", "steps"),
    ):
        yield from ((name, label | {by: key}, value) for key, value in values.items() if _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

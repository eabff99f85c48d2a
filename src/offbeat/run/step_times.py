"""Time of a finished run's steps: as predicted, and whether compression paid off.

Compression makes a step cheaper on slow links and usually needs more of them. It pays off only if
`T_compressed * I_compressed < T_dense * I_dense`. The run measures the first side itself, and the time of a dense step
too: now and then it also exchanges its numbers uncompressed. The number of dense steps comes from a dense run of the
same task, workers and target in the same folder, if there is one.

The prediction plays the schedules of the run with the same bytes in virtual time (`simulate.predicted_step`), on links
as measured when the run began. A difference is time by which exchanges deviated from their schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from offbeat.protocols.pipelines.plan import PartSeconds
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.run.untrusted_files import read_object
from offbeat.simulate.pipelines import LinkCost, StagedStep
from offbeat.simulate.predicted_step import Step, network_of, step_time
from offbeat.simulate.units import seconds_in_words
from offbeat.strategies import combined, parse
from offbeat.strategies._base import Combined

_FINISHED = "finished"
GIVEN, MEASURED = "the hosts' rate, latency measured at the start", "measured at the start"


def without_compression(strategy: str) -> str | None:
    """The same strategy without its compressors; None if it has none."""
    parts = combined(parse(strategy))
    return str(Combined(parts.exchange, parts.when)) if parts.compressions else None


def verdict(data: Mapping[str, Any], config: Mapping[str, Any], runs: Path) -> dict[str, Any]:
    """The payoff for the result; empty if nothing was compressed.

    `config` is the run's configuration as in run.json; `runs` is the folder of other runs.
    """
    strategy = str(data["strategy"])
    plain = without_compression(strategy)
    if plain is None or not data.get("steps"):
        return {}
    step = step_seconds(data)
    dense = _dense_step(data, step)
    other = _dense_run(config, plain, runs)
    steps = None
    if other is not None and other.get("reached_target") and data.get("reached_target"):
        steps = float(data["steps"]) / float(other["steps"])
    payoff: dict[str, Any] = {
        "step_seconds": step,
        "dense_step_seconds": dense,
        "dense_step_from": "dense exchanges in this run" if dense is not None else None,
        "steps": int(data["steps"]) if data.get("reached_target") else None,
        "dense_steps": None if steps is None or other is None else int(other["steps"]),
        "dense_run": None if other is None else str(other["run"]),
    }
    if dense is None and other is not None:
        payoff["dense_step_seconds"] = dense = step_seconds(other)
        payoff["dense_step_from"] = "the dense run"
    ratio = None if dense is None else step / max(dense, 1e-12)
    payoff["pays"] = None if ratio is None or steps is None else ratio * steps < 1
    return payoff | {"words": _words(strategy, plain, ratio, steps, data)}


def _words(strategy: str, plain: str, step: float | None, steps: float | None, data: Mapping[str, Any]) -> str:
    name = " + ".join(map(str, combined(parse(strategy)).compressions))
    if int(data.get("workers", 2)) == 1 and not data.get("compression"):
        return f"{name}: one worker sends nothing to others, so there is nothing that compression could save."
    if step is None:
        return f"{name}: what a dense step takes here was not measured. Run {plain} beside it, with the same target."
    if steps is None:
        missing = f"a dense run that reaches the target, of {plain}" if data.get("target") else "a target"
        return f"{name}: step {step:.2f}x of a dense one here; steps to the target are unknown without {missing}."
    if step * steps < 1:
        return f"{name} pays here: step {step:.2f}x, {steps:.2f}x the steps, {step * steps:.2f}x the time to target."
    but = "but " if step < 1 else "and "
    return f"{name} does not pay here: step {step:.2f}x, {but}{steps:.2f}x the steps."


def step_seconds(data: Mapping[str, Any]) -> float:
    """Time of a step, without evaluations and without exchanges that were made only to measure them."""
    evaluating = data.get("seconds_by_kind", {}).get("evaluate", 0.0)
    probing = data.get("compression", {}).get("probing_seconds", 0.0)
    spent = float(data["seconds"]) - float(evaluating) - float(probing)
    return spent / max(int(data["steps"]), 1)


def _dense_step(data: Mapping[str, Any], step: float) -> float | None:
    """Time of a step of this run with dense exchanges in place of compressed ones."""
    account = data.get("compression", {})
    if "as_dense_seconds" not in account:
        return None
    saved = float(account["as_dense_seconds"]) - float(account["as_compressed_seconds"])
    return max(0.0, step + saved / max(int(data["steps"]), 1))


def _dense_run(config: Mapping[str, Any], plain: str, runs: Path) -> dict[str, Any] | None:
    """The result of the newest finished run of the same without compression."""
    for path in sorted(runs.glob("*/run.json"), reverse=True):
        try:
            run = read_object(path)
            theirs, result = run["config"], run["result"]
            same = all(theirs.get(name) == config.get(name) for name in ("what", "workers", "hosts"))
            goal, ours = theirs["goal"], config["goal"]
            same = same and all(goal.get(name) == ours.get(name) for name in ("target", "parts", "disturb"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # Not a run folder.
        if same and run.get("state") == _FINISHED and goal.get("strategy") == plain:
            return cast("dict[str, Any]", result)
    return None


def predicted(data: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The prediction for the result; empty for a run that exchanged nothing.

    `config` is the run's configuration as in run.json.
    """
    reported, steps = data.get("foreseen"), int(data.get("steps") or 0)
    if not reported or not steps:
        return {}
    took = step_seconds(data)
    if isinstance(reported, str):
        words = f"step {seconds_in_words(took)} measured; not predicted: {reported}"
        return {"step_seconds": took, "predicted_seconds": None, "words": words}
    if "parts" in reported:
        return _predicted_stages(data, msgspec.convert(reported, StagedStep), config)
    step = msgspec.convert(reported, Step)
    if not step.trials:
        return {}
    hosts = config.get("hosts")
    rate = Hosts.from_plain(hosts).slowest if hosts else None
    network = network_of(step, rate)
    coding = float(data.get("compression", {}).get("coding_seconds", 0.0)) / steps
    computing = [float(spent) / steps + coding for spent in data["computing_seconds"]]
    expected = step_time(step, network, computing)
    apart = len(set(step.hosts)) > 1
    link = network.between if apart else network.inside
    return {
        "step_seconds": took,
        "predicted_seconds": expected,
        "computing_seconds": max(computing) - coding,
        "coding_seconds": coding,
        "exchanging_seconds": step_time(step, network, [0.0] * len(step.hosts)),
        "exchanges": msgspec.to_builtins(list(step.exchanges)),
        "period": step.period,
        "latency_seconds": link.alpha,
        "bytes_per_second": 1 / link.beta if link.beta else None,
        "links": GIVEN if rate is not None and apart else MEASURED,
        "words": f"step {seconds_in_words(took)} measured, {seconds_in_words(expected)} predicted",
    }


def _predicted_stages(data: Mapping[str, Any], step: StagedStep, config: Mapping[str, Any]) -> dict[str, Any]:
    """The prediction of a pipeline's step, from the costs of its parts and links."""
    took = data["split"]["step_seconds"]
    if took is None:
        return {}
    hosts, apart = config.get("hosts"), len(set(step.hosts)) > 1
    rate = Hosts.from_plain(hosts).slowest if hosts else None
    if rate is not None and apart:
        step = msgspec.structs.replace(step, between=LinkCost(step.between.latency, 1 / rate))
    prediction, link = step.prediction(), step.between if apart else step.inside
    took *= step.batches
    return {
        "step_seconds": took,
        "predicted_seconds": prediction.seconds,
        "by_run_seconds": msgspec.structs.replace(step, parts=_parts_in_run(step, data)).prediction().seconds,
        "computing_seconds": max(prediction.computing),
        "exchanging_seconds": max(step.exchanging, default=0.0),
        "idle": list(prediction.idle),
        "message_bytes": step.message_bytes,
        "parts": [part._asdict() for part in step.parts],
        "outside_seconds": list(step.outside),
        "latency_seconds": link.latency,
        "bytes_per_second": 1 / link.per_byte if link.per_byte else None,
        "links": GIVEN if rate is not None and apart else MEASURED,
        "words": f"step {seconds_in_words(took)} measured, {seconds_in_words(prediction.seconds)} predicted",
    }


def _parts_in_run(step: StagedStep, data: Mapping[str, Any]) -> tuple[PartSeconds, ...]:
    """What the parts took on average in the run."""
    stages = data["split"]["stages"]
    own = [stages[part % step.stages]["parts"][part // step.stages] for part in range(len(step.parts))]
    seconds = [(each["forward_seconds"], each["backward_seconds"]) for each in own]
    return tuple(
        PartSeconds(
            forward, both, None if before.weights is None else before.weights * both / max(before.backward, 1e-12)
        )
        for (forward, both), before in zip(seconds, step.parts, strict=True)
    )

"""Predicted and measured time of a run's steps.

Workers report what a step exchanges and how long each of them computed; the rest is simulated in virtual time
(`simulate.predicted_step`): the same schedules with the same bytes, on links as measured when the run began, or with
the rate that the hosts were given. A difference between the two is time by which exchanges deviated from their
schedules: other traffic, busy processors, occasional stragglers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from offbeat.run.compression_payoff import step_seconds
from offbeat.runtime.hosts import Hosts
from offbeat.simulate.predicted_step import Step, network_of, step_time
from offbeat.simulate.units import seconds_in_words

GIVEN, MEASURED = "the hosts' rate, latency measured at the start", "measured at the start"


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

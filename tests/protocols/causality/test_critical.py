"""Blame by arrival, and what a run would take without somebody's lateness."""

from __future__ import annotations

import pytest
from causal_support import few
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.causality.critical import Forecast, arrivals, forecasts
from offbeat.protocols.causality.histories import Call, Computation, Event, EventKind, computation

INPUT, COMPUTE, NETWORK = 0.1, 0.4, 0.05


def without_lateness(run: Computation, process: str) -> Forecast:
    return forecasts(run, [process])[0]


def trained(workers: int, delays: list[tuple[int, str, float]], uneven: float = 0.0) -> Computation:
    """Steps of reading, computing and summing, in each of which one worker is delayed in something."""
    names = tuple(f"worker {i}" for i in range(workers))
    histories: dict[str, list[Event]] = {name: [Event(what="begin")] for name in names}
    left = [0.0] * workers
    for step, (late, kind, delay) in enumerate(delays, 1):
        call = Call("world", step, names, "all_reduce")
        entered = []
        for i, name in enumerate(names):
            spent = {"input": INPUT, "compute": COMPUTE + i * uneven}
            if i == late and kind in spent:
                spent[kind] += delay
            loaded = left[i] + spent["input"]
            entered.append(loaded + spent["compute"])
            histories[name].append(Event(what="batch", time=loaded, spent={"input": spent["input"]}))
            histories[name].append(
                Event(EventKind.ENTER, time=entered[-1], spent={"compute": spent["compute"]}, call=call)
            )
        for i, name in enumerate(names):
            left[i] = max(entered) + NETWORK + (delay if i == late and kind == "network" else 0.0)
            histories[name].append(Event(EventKind.EXIT, time=left[i], call=call))
    return computation(histories)


late_steps = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["input", "compute"]), st.floats(0.01, 2.0)), min_size=1, max_size=6
)


@few
@given(st.integers(3, 4), late_steps)
def test_blame_points_at_the_right_worker_and_kind(workers: int, delays: list[tuple[int, str, float]]) -> None:
    found = arrivals(trained(workers, delays))
    assert [arrival.sequence for arrival in found] == list(range(1, len(delays) + 1))
    for arrival, (worker, kind, delay) in zip(found, delays, strict=True):
        assert (arrival.last, arrival.kind) == (f"worker {worker}", kind)
        assert arrival.lateness == pytest.approx(delay)
        assert arrival.lost == pytest.approx(delay * (workers - 1))
        assert sum(arrival.by_kind.values()) == pytest.approx(arrival.lateness)
        assert arrival.by_kind[kind] == pytest.approx(delay)


def test_a_slow_link_is_blamed_in_the_next_collective() -> None:
    found = arrivals(trained(3, [(1, "network", 0.5), (0, "input", 0.0)]))
    assert (found[1].last, found[1].kind, found[1].lateness) == ("worker 1", "network", pytest.approx(0.5))
    assert str(found[1]) == ("worker 1 was last in #2 of group world, 0.5 s late, mostly network; the others lost 1 s")


def duration(run: Computation) -> float:
    return max(event.time for history in run.histories for event in history)


@few
@given(st.integers(3, 4), late_steps)
def test_the_forecast_is_what_the_run_takes_without_the_delay(
    workers: int, delays: list[tuple[int, str, float]]
) -> None:
    run = trained(workers, delays)
    for worker in range(workers):
        forecast = without_lateness(run, f"worker {worker}")
        kept = [(late, kind, 0.0 if late == worker else delay) for late, kind, delay in delays]
        assert forecast.seconds == pytest.approx(duration(run))
        assert forecast.without == pytest.approx(duration(trained(workers, kept)))
        assert sum(forecast.removed.values()) == pytest.approx(sum(d for late, _, d in delays if late == worker))


def test_the_forecast_knows_of_slow_links() -> None:
    forecast = without_lateness(trained(2, [(1, "network", 0.5), (0, "input", 0.0)]), "worker 1")
    assert forecast.without == pytest.approx(duration(trained(2, [(0, "input", 0.0)] * 2)))
    assert forecast.removed["network"] == pytest.approx(0.5)


def test_whoever_is_last_then_is_waited_for_instead() -> None:
    run = trained(3, [(0, "compute", 1.0)], uneven=0.1)
    forecast = without_lateness(run, "worker 0")
    # Worker 0 would come as the others do on average; worker 2, the slower of them, would be last.
    assert forecast.without == pytest.approx(INPUT + COMPUTE + 0.2 + NETWORK)
    assert without_lateness(run, "worker 1").without == forecast.seconds


def test_lateness_in_overlapping_sums_is_taken_out_once() -> None:
    names = ("a", "b")
    calls = [Call("world", n, names, "all_reduce") for n in (1, 2)]
    histories = {
        name: [
            Event(what="begin"),
            Event(EventKind.ENTER, time=1.0 + late, spent={"compute": 1.0 + late}, call=calls[0]),
            Event(EventKind.ENTER, time=2.0 + late, spent={"compute": 1.0}, call=calls[1]),
            Event(EventKind.EXIT, time=2.0 + late, call=calls[0]),
            Event(EventKind.EXIT, time=2.6, call=calls[1]),
        ]
        for name, late in (("a", 0.0), ("b", 0.5))
    }
    forecast = without_lateness(computation(histories), "b")
    assert forecast.removed == {"compute": pytest.approx(0.5)}
    assert forecast.without == pytest.approx(2.1)


def test_waiting_for_a_message_is_not_the_receivers_lateness() -> None:
    names = ("a", "b")
    call = Call("world", 1, names)
    histories = {
        "a": [Event(), Event(EventKind.SEND, time=5.0, message=1), Event(EventKind.ENTER, time=5.1, call=call)],
        "b": [Event(), Event(EventKind.RECEIVE, time=5.5, message=1), Event(EventKind.ENTER, time=6.0, call=call)],
    }
    (arrival,) = arrivals(computation(histories))
    assert arrival.by_kind["wait"] == pytest.approx(5.0)
    assert arrival.by_kind["network"] == pytest.approx(0.5)


def test_without_events_there_is_no_forecast() -> None:
    empty = computation({"a": []})
    assert arrivals(empty) == []
    with pytest.raises(UsageError, match="without events"):
        without_lateness(empty, "a")

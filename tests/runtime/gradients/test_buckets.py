"""Gradient buckets in real processes: what they agree on, what their header says, and whose time is whose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import RunError
from offbeat.runtime.launch import Launcher, Role, serve_store, worker_environment

ENTRY = "own_scripts.bucketing:run"
LAYERS = 6
"""Three layers of one weight and one bias each."""


def go(launcher: Launcher, folder: Path, case: str, workers: int = 2, capacity: int = 1 << 20) -> list[dict[str, Any]]:
    """What each worker has seen."""
    store = serve_store()
    roles = [
        Role(
            kind="worker",
            rank=rank,
            entry=ENTRY,
            config={"case": case, "capacity": capacity},
            environment=worker_environment(rank, workers, store.port),
            log=folder / f"{rank}.log",
            threads=1,
        )
        for rank in range(workers)
    ]
    seen: dict[int, dict[str, Any]] = {}

    def note(role: Role, message: Mapping[str, Any]) -> None:
        seen[message["rank"]] = dict(message["seen"])

    launcher.run(roles, on_message=note)
    return [seen[rank] for rank in range(workers)]


@pytest.mark.parametrize("capacity", [1, 1 << 20])
def test_all_take_the_order_in_which_worker_0_saw_gradients(launcher: Launcher, tmp_path: Path, capacity: int) -> None:
    found = go(launcher, tmp_path, "order", 3, capacity)
    orders = [tuple(one["order"]) for one in found]
    assert len(set(orders)) == 1
    assert sorted(orders[0]) == list(range(LAYERS))
    assert {orders[0][0] // 2, orders[0][-1] // 2} == {2, 0}, "the last layer's gradients come first"
    assert found[0]["gradients"] == found[1]["gradients"] == found[2]["gradients"]


@pytest.mark.parametrize("capacity", [1, 1 << 20])
def test_the_header_tells_examples_arrivals_batches_and_use(launcher: Launcher, tmp_path: Path, capacity: int) -> None:
    for one in go(launcher, tmp_path, "header", 3, capacity):
        assert one["examples"] == 1 + 2 + 3
        assert one["batches"] == [2, 2, 2]
        assert all(0 < arrival < 64 for arrival in one["arrivals"])
        assert one["used"] == [3, 3, 3, 3, 1, 1]


def test_an_unknown_total_gives_the_same_mean_as_a_known_one(launcher: Launcher, tmp_path: Path) -> None:
    found = go(launcher, tmp_path, "header", 3)
    for one in found:
        known, unknown = one["mean"]
        assert unknown == pytest.approx(known, rel=1e-5)
        assert one["mean"] == found[0]["mean"]


def test_a_total_that_is_not_what_came_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="expected a step of 99 examples, but the workers together brought 6"):
        go(launcher, tmp_path, "unequal_totals")


def test_a_late_worker_makes_the_others_wait_and_not_itself(launcher: Launcher, tmp_path: Path) -> None:
    prompt, late = (one["seconds"] for one in go(launcher, tmp_path, "lateness"))
    assert prompt["wait"] > 0.5, "three times 0.2 s, less what the machine's noise may take"
    assert late["wait"] < prompt["wait"] / 2
    assert late["compute"] > 0.5
    assert prompt["communicate"] < 0.3


def test_what_runs_beside_backward_is_overlapped(launcher: Launcher, tmp_path: Path) -> None:
    """Two passes, each with 0.1 s of backward after the first bucket has started; one bucket overlaps with nothing."""
    for one in go(launcher, tmp_path, "overlap", capacity=1):
        assert one["buckets"] == LAYERS
        assert one["overlapped"] > 0.15
    for one in go(launcher, tmp_path, "overlap"):
        assert one["buckets"] == 1
        assert one["overlapped"] < 0.05

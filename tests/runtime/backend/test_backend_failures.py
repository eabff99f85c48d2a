"""Ranks that never come, die, or call something else: errors that name them, in time, and nothing left behind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from backend_cases.running import BACKEND, roles_for

from conftest import wait_until
from offbeat.errors import RunError
from offbeat.runtime.launch import Launcher, Role, serve_store

SHARED = Path("/dev/shm")
ours = pytest.mark.skipif(BACKEND == "gloo", reason="what Gloo does not tell")


def run(launcher: Launcher, folder: Path, entry: str, size: int, **config: Any) -> dict[int, dict[str, Any]]:
    """What each rank that lived to tell heard, by rank."""
    store = serve_store()
    heard: dict[int, dict[str, Any]] = {}

    def note(_: Role, message: Mapping[str, Any]) -> None:
        heard[message["rank"]] = dict(message)

    launcher.run(roles_for(folder, store.port, size, f"backend_cases.failures:{entry}", config), on_message=note)
    return heard


@pytest.mark.slow
@pytest.mark.parametrize("elements", [4, 100_000])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_never_comes_is_named_with_what_was_called(
    launcher: Launcher, tmp_path: Path, elements: int, asynchronous: bool
) -> None:
    heard = run(launcher, tmp_path, "never_arrive", 3, elements=elements, asynchronous=asynchronous)
    for rank in (0, 1):
        text = heard[rank]["error"]
        assert text, f"rank {rank} heard nothing"
        assert heard[rank]["seconds"] < 15, "the deadline was 2 s"
        if BACKEND != "gloo":
            assert re.search(r"all_?reduce", text), text
            assert re.search(rf"{elements}, 3\b", text), f"its shape: {text}"
            assert re.search(r"\b3\b", text), f"its place in the order of calls: {text}"
            assert re.search(r"rank 2\b|ranks? \[?2\b", text), f"who did not come: {text}"
            assert re.search(r"ranks? (\[|\()?0(, | and )1", text), f"who did come: {text}"
            assert re.search(r"group late: Timed out after 1 s of waiting for rank 2;", heard[rank]["again"]), heard


@pytest.mark.slow
@pytest.mark.parametrize("elements", [4, 1_000_000])
def test_survivors_of_a_killed_rank_are_told_at_once(launcher: Launcher, tmp_path: Path, elements: int) -> None:
    heard = run(launcher, tmp_path, "be_killed", 3, elements=elements)
    for rank in (0, 1):
        assert heard[rank]["error"], f"rank {rank} heard nothing"
        assert heard[rank]["seconds"] < 15, "the deadline was two minutes"
        if BACKEND != "gloo":
            assert re.search(r"rank 2\b|ranks? \[?2\b", heard[rank]["error"]), heard[rank]["error"]
            assert re.search(rf"rank 2 died: rank {rank} in recv from rank 2 .*\(7,\)", heard[rank]["again"]), heard


@pytest.mark.slow
def test_nothing_is_left_in_shared_memory_when_all_are_killed(launcher: Launcher, tmp_path: Path) -> None:
    before = set(SHARED.iterdir())
    with pytest.raises(RunError):
        run(launcher, tmp_path, "all_be_killed", 3)
    wait_until(lambda: not set(SHARED.iterdir()) - before, "shared memory to be as it was")


@ours
@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        "all_reduce of another shape",
        "all_reduce of another dtype",
        "all_reduce of the greatest",
        "broadcast",
        "barrier",
    ],
)
@pytest.mark.parametrize("elements", [4, 200_000])
def test_ranks_that_call_different_things_are_told_so(
    launcher: Launcher, tmp_path: Path, elements: int, other: str
) -> None:
    heard = run(launcher, tmp_path, "disagree", 2, elements=elements, calls=["all_reduce", other])
    for rank in (0, 1):
        assert heard[rank]["error"], f"rank {rank} was not told of {other}: {heard}"
        assert "nothing was said" not in heard[rank]["again"], f"a group that is out of step went on: {heard}"
        assert "Destroy the group" in heard[rank]["again"]


@pytest.mark.slow
def test_a_monitored_barrier_names_who_did_not_come(launcher: Launcher, tmp_path: Path) -> None:
    text = run(launcher, tmp_path, "miss_a_monitored_barrier", 4)[0]["error"]
    assert re.search(r"\b2, 3\b", text), text

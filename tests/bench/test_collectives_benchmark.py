"""The collectives benchmark: what it verifies, how it compares, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from conftest import wait_until
from offbeat.bench import Spread, collectives, geometric_mean, holds, measured, picture, ratio, table, why_no_mpi
from offbeat.bench._calls import BLOCKWISE, CALLS, FIRST, Exercise, FloatArray
from offbeat.bench._mpi import run_under_mpi
from offbeat.bench._ranks import MOST_CALLS, repeats
from offbeat.bench._show import in_bytes, in_seconds
from offbeat.errors import RunError, UsageError, WaitError
from offbeat.runtime.launch import private_store

needs_mpi = pytest.mark.skipif(why_no_mpi() is not None, reason=str(why_no_mpi()))
Heard = Callable[[Mapping[str, Any]], None]


def test_a_ratio_is_of_medians_and_its_interval_holds_it() -> None:
    found = ratio([3.0, 3.0, 3.3, 2.9, 90.0], [1.0, 1.1, 0.9, 1.0, 30.0])
    assert found.median == pytest.approx(3.0)
    assert found.low <= found.median <= found.high


def test_paired_blocks_are_drawn_together() -> None:
    slow_machine = np.linspace(1, 50, 15)
    found = ratio(list(2 * slow_machine), list(slow_machine))
    assert (found.low, found.high) == pytest.approx((2, 2))


def test_a_geometric_mean_weighs_all_sizes_alike() -> None:
    found = geometric_mean([([4.0] * 5, [1.0] * 5), ([900.0] * 5, [100.0] * 5)])
    assert (found.low, found.median, found.high) == pytest.approx((6, 6, 6))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Spread(12.5, 12.1, 13.0), True),
        (Spread(11.5, 10.0, 12.1), True),
        (Spread(11.5, 10.0, 11.9), False),  # no end of the interval reaches it
        (Spread(11.0, 1.0, 99.0), False),  # an interval that holds everything proves nothing
    ],
)
def test_a_bar_holds_by_the_better_end_of_the_interval_and_a_median_within_five_percent(
    found: Spread, expected: bool
) -> None:
    assert holds(found, at_least=12) is expected
    upside_down = Spread(1 / found.median, 1 / found.high, 1 / found.low)
    assert holds(upside_down, at_most=1 / 12) is expected


def summed(own: FloatArray, ranks: int, calls: int) -> FloatArray:
    """What an exact peer leaves when all ranks bring the same."""
    return (own.astype(np.float64) * float(ranks) ** calls).astype(np.float32)


def all_reduce(data: FloatArray, own: FloatArray, ranks: int) -> Exercise:
    expected = [(data, own.astype(np.float64) * ranks)]
    return Exercise(lambda: None, expected, growth=float(ranks), scale=ranks * FIRST)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_sums_of_sums_stay_finite_for_as_many_calls_as_a_block_has(ranks: int) -> None:
    calls = repeats(4096, ranks)
    own = np.full(8, 5 * FIRST, dtype=np.float32)
    place = summed(own, ranks, calls + 1)
    exercise = all_reduce(place, own, ranks)
    exercise.verify(calls + 1, "an exact peer")


@pytest.mark.parametrize("damage", [np.nan, 0.0, 1.01])
def test_one_wrong_value_is_refused_before_timing(damage: float) -> None:
    own = np.random.default_rng(0).standard_normal(1000, dtype=np.float32) * np.float32(FIRST)
    data = summed(own, 2, 3)
    data[np.argmax(np.abs(data))] *= np.float32(damage)
    with pytest.raises(RunError, match="wrong result of a liar"):
        all_reduce(data, own, 2).verify(3, "a liar")


def test_blocks_have_many_calls_of_small_sizes_and_few_of_large_ones() -> None:
    assert repeats(4096, 2) == MOST_CALLS
    assert repeats(4096, 4) < repeats(4096, 2)
    assert 1 < repeats(25 << 20, 2) < 20


def test_numbers_read_as_people_write_them() -> None:
    assert [in_bytes(size) for size in (12, 4096, 25 << 20)] == ["12 B", "4 KiB", "25 MiB"]
    assert [in_seconds(seconds) for seconds in (4.25e-6, 0.0171, 2.0)] == ["4.25 µs", "17.1 ms", "2 s"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ranks": 1}, "nothing to exchange"),
        ({"blocks": 0}, "1 or more"),
        ({"sizes": [6]}, "multiple of 4"),
        ({"sizes": []}, "at least one size"),
        ({"peers": ["glo"]}, "Did you mean 'gloo'"),
        ({"calls": ["sned"]}, "Did you mean 'send'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_process_starts(change: dict[str, Any], says: str) -> None:
    asked: dict[str, Any] = {"ranks": 2, "sizes": [4096], "peers": ["gloo"], "blocks": 15} | change
    with pytest.raises(UsageError, match=says):
        collectives(**asked, out=None, picture=None, say=print)


RESULT: dict[str, Any] = {
    "operation": "all-reduce",
    "dtype": "float32",
    "ranks": 2,
    "peers": ["offbeat", "gloo"],
    "environment": {"cores": 2},
    "rows": [
        {
            "bytes": size,
            "seconds": {"offbeat": 1e-5, "gloo": 4e-4},
            "ratios": {"gloo / offbeat": {"median": 40.0, "low": 35.0, "high": 45.0}},
            "noise": {"median": 1.01, "low": 0.9, "high": 1.1},
        }
        for size in (4096, 1 << 20)
    ],
}


def test_the_table_has_a_row_for_each_size_with_times_and_ratios() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table(RESULT))
    text = shown.get()
    for word in ("4 KiB", "1 MiB", "10 µs", "400 µs", "gloo / offbeat", "40x (35 to 45)", "1.01x (0.9 to 1.1)"):
        assert word in text


def test_a_picture_is_drawn_of_several_results(tmp_path: Path) -> None:
    picture([RESULT, RESULT | {"ranks": 4}], tmp_path / "time.png")
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")


def test_each_size_is_measured_at_the_thread_level_at_which_mpi_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {("single", 64): 1.0, ("multiple", 64): 2.0, ("single", 128): 9.0, ("multiple", 128): 3.0}
    runs: list[tuple[str, list[int], list[str]]] = []

    def pretend(config: Mapping[str, Any], heard: Heard) -> None:
        level = config["thread level"]
        runs.append((level, config["sizes"], config["peers"]))
        for size in config["sizes"]:
            heard({"begins": size})
            heard({"bytes": size, "seconds": {name: [took[level, size]] for name in config["peers"]}, "calls": 1})

    monkeypatch.setattr("offbeat.bench._collectives.run_under_mpi", pretend)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    found = measured(2, [128, 64], ["gloo", "mpi"], 1, print)
    assert runs[2:] == [("single", [64], ["gloo", "mpi"]), ("multiple", [128], ["gloo", "mpi"])]
    assert found.levels == {64: "single", 128: "multiple"}
    assert list(found.times) == [128, 64]
    assert list(found.times[64]) == ["gloo", "mpi"]
    # Three ranks on two cores are not left to spin.
    assert set(measured(3, [64, 128], ["mpi"], 1, print).levels.values()) == {"multiple"}


@pytest.mark.slow
def test_peers_are_measured_on_real_processes_and_written_down(tmp_path: Path) -> None:
    said: list[str] = []
    out, drawn = tmp_path / "a/found.json", tmp_path / "b/found.png"
    (result,) = collectives(2, [64, 4096], ["offbeat", "gloo"], 2, out, drawn, said.append)
    assert json.loads(out.read_text()) == result
    assert drawn.exists()
    assert [row["bytes"] for row in result["rows"]] == [64, 4096]
    assert all(row["seconds"]["gloo"] > 0 and row["noise"]["median"] > 0 for row in result["rows"])
    assert all(row["ratios"]["gloo / offbeat"]["median"] > 0 for row in result["rows"])
    assert said == ["all_reduce, 64 bytes on 2 ranks", "all_reduce, 4096 bytes on 2 ranks"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_is_measured_with_blocks_of_whole_numbers(ranks: int, tmp_path: Path) -> None:
    others = [call for call in CALLS if call != "all_reduce"]
    out = tmp_path / "found.json"
    results = collectives(ranks, [1000], ["offbeat"], 1, out, None, print, others)
    assert json.loads(out.read_text()) == results
    assert [result["operation"].replace("-", "_") for result in results] == others
    for call, result in zip(others, results, strict=True):
        (row,) = result["rows"]
        rounded = 1000 - 1000 % (4 * ranks) if call in BLOCKWISE else 1000
        assert row["bytes"] == (4 if call == "barrier" else rounded)
        assert row["seconds"]["offbeat"] > 0


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("call", [call for call in CALLS if call != "all_reduce"])
def test_mpi_makes_every_call_with_the_same_result(call: str) -> None:
    heard: list[Mapping[str, Any]] = []
    with mpi_config(["mpi", "offbeat"]) as config:
        run_under_mpi(config | {"call": call}, heard.append)
    assert min(heard[2]["seconds"]["mpi"]) > 0


@pytest.mark.slow
def test_tensors_in_shared_memory_are_measured_beside_a_plain_copy() -> None:
    found = measured(2, [1 << 20], ["zero copy", "copy"], 2, print)
    assert {name: len(times) for name, times in found.times[1 << 20].items()} == {"zero copy": 2, "copy": 2}


@contextmanager
def mpi_config(peers: list[str]) -> Generator[dict[str, Any]]:
    config: dict[str, Any] = {
        "ranks": 2,
        "sizes": [64],
        "peers": peers,
        "blocks": 2,
        "hurry": 100,
        "thread level": "multiple",
    }
    config |= {"call": "all_reduce", "seconds": 0.01}
    with private_store() as store:
        yield config | {"store": store.path}


def descendants() -> list[str]:
    """Command lines of processes that a benchmark under mpiexec starts, as far as they still live."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                mine = f"OFFBEAT_TEST={os.getpid()}".encode() in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mine:
                found.append(b" ".join(words).decode())
    return found


@pytest.mark.slow
@needs_mpi
def test_mpi_and_gloo_are_measured_in_the_same_processes() -> None:
    heard: list[Mapping[str, Any]] = []
    with mpi_config(["gloo", "mpi"]) as config:
        run_under_mpi(config, heard.append)
    assert heard[0]["library"]
    assert heard[1] == {"begins": 64}
    assert list(heard[2]["seconds"]) == ["gloo", "mpi"]
    assert all(len(times) == 2 and min(times) > 0 for times in heard[2]["seconds"].values())


@pytest.mark.slow
@needs_mpi
def test_ranks_that_fail_under_mpiexec_say_why_and_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_TEST", str(os.getpid()))
    with mpi_config(["gloo", "nonsense"]) as config, pytest.raises(RunError, match="nonsense"):
        run_under_mpi(config, print)
    wait_until(lambda: not descendants(), "the ranks to be gone")


@pytest.mark.slow
@needs_mpi
def test_silent_ranks_under_mpiexec_are_given_up_and_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_TEST", str(os.getpid()))

    def lose_patience(_: Mapping[str, Any]) -> None:
        assert descendants() != []
        monkeypatch.setattr("offbeat.bench._mpi.SILENCE", 0.0)

    with mpi_config(["mpi"]) as config, pytest.raises(WaitError, match="printed nothing"):
        run_under_mpi(config | {"blocks": 10**6}, lose_patience)
    wait_until(lambda: not descendants(), "the ranks to be gone")

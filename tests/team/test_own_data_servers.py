"""Scripts whose batches are prepared by data servers, which run them up to their first pass over a loader."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_scripts import compare
from own_scripts.running import left, run_script, same

from offbeat.errors import DataError, OffbeatError
from offbeat.runtime.launch import Launcher


@pytest.mark.parametrize("data", ["loading", "stream"])
def test_a_script_ends_with_the_same_bits_as_with_loading_processes(
    launcher: Launcher, tmp_path: Path, data: str
) -> None:
    """Noise that examples draw included: each batch has a seed of its own, wherever it is prepared."""
    for name, more in (("without", {}), ("with", {"data_servers": 2})):
        words = (tmp_path / name, "9.9.9", data, "range")
        run_script(launcher, tmp_path, "resuming.py", *words, workers=2, strategy="allreduce", timeout=60.0, **more)
    for one, other in zip(left(tmp_path / "without", 2), left(tmp_path / "with", 2), strict=True):
        same(one["state"], other["state"], tolerance=0)
        assert one["facts"] == other["facts"]


def test_a_loop_may_evaluate_on_the_loader_that_it_trains_on(launcher: Launcher, tmp_path: Path) -> None:
    for name, more in (("without", {}), ("with", {"data_servers": 1})):
        run_script(launcher, tmp_path, "data_served.py", tmp_path / name, "nested", workers=2, seed=1, **more)
    for one, other in zip(left(tmp_path / "without", 2), left(tmp_path / "with", 2), strict=True):
        same(one["state"], other["state"], tolerance=0)
        assert one["facts"] == other["facts"] != {"seen": 0}


def test_a_killed_worker_costs_nothing_but_time_with_data_servers(launcher: Launcher, tmp_path: Path) -> None:
    compare(launcher, tmp_path, "1.4.1", "map", "epochs", data_servers=2)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("finished batches", "a list hands out finished batches.*Give prepare.. a torch DataLoader"),
        ("own part", "each worker's own part"),
        ("tuples", r"sampler yields \(\d, 'left'\), a tuple"),
        ("named tuples", "the batch is a __main__.Pair.*never as pickles"),
        ("late", "prepares its loader 1 .*Prepare all loaders before the first pass"),
        ("no pass", "it ended without iterating a loader"),
    ],
)
def test_what_data_servers_cannot_read_is_refused_with_what_to_do(
    launcher: Launcher, tmp_path: Path, case: str, words: str
) -> None:
    with pytest.raises(OffbeatError, match=f"(?s){words}") as raised:
        run_script(launcher, tmp_path, "data_served.py", tmp_path / "out", case, workers=2, data_servers=1)
    assert isinstance(raised.value, DataError) or case == "no pass"

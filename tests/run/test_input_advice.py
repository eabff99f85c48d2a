"""When a run waits for its input, and what other ways would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_tasks import Decoded

from offbeat.run.drive import fit
from offbeat.run.input_advice import input_advice
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.report import report_lines

FIGURES = {
    "processor_share": 0.05,
    "bytes_per_example": 3000,
    "examples": 10_000,
    "copied_bytes_per_second": 5e9,
}


def run(waiting: float = 6.0, figures: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    kinds = {"input": waiting, "compute": 10.0 - waiting}
    known = {"workers": 2, "seconds": 10.0, "samples": 40_000, "epochs": 4, "seconds_by_kind": kinds}
    return known | {"input": FIGURES | (figures or {})} | more


def advice(data: dict[str, Any], servers: int = 0, threads: int = 1, cores: int = 4) -> list[str]:
    return input_advice(data, {"goal": {"data_servers": servers}, "threads": threads}, cores, 10**9)


def test_what_waits_for_a_disk_gets_as_many_data_servers_as_it_takes() -> None:
    words = advice(run())
    assert words[0] == "the run waited for input in 60% of its time: reading and decoding an example took 300 us"
    # 12 s of reading in all, beside 4 s of the rest: three data servers, and then nothing is waited for.
    assert words[1] == "with --data-servers 3 it would be about 2.5 times as fast"
    # Read once instead of four times: 10 s become 4 + 6 / 4.
    assert words[2].startswith("decoded once and kept in memory (30.0 MB), as a TensorDataset, about 1.8 times")


def test_what_needs_a_processor_gets_no_more_than_there_are() -> None:
    assert "--data-servers 2 it would be about 1.7 times" in advice(run(figures={"processor_share": 0.9}))[1]
    words = advice(run(figures={"processor_share": 0.9}), cores=2)[1]
    assert "would not help on this machine" in words
    assert "another host" in words


@pytest.mark.parametrize("data", [run(waiting=0.9), run(waiting=6.0, seconds=0.5), run(input={})])
def test_where_input_is_small_or_unknown_nothing_is_said(data: dict[str, Any]) -> None:
    assert advice(data) == []


def test_what_does_not_fit_into_memory_or_is_read_once_is_not_kept_there() -> None:
    assert "too much to keep in memory" in advice(run(figures={"examples": 10**6}))[2]
    assert len(advice(run(epochs=1))) == len(advice(run(figures={"examples": None}))) == 2


def test_too_few_data_servers_are_told_how_many_would_do() -> None:
    accounts = [{"seconds": 9.0}]
    assert "--data-servers 3 would keep up" in advice(run(data_servers=accounts), servers=1)[0]


def test_a_run_that_reads_slowly_says_so(launcher: Launcher, tmp_path: Path) -> None:
    """Four milliseconds an example, asleep as if it waited for a disk."""
    task = Decoded(examples=96, milliseconds=4.0)
    result = fit(task, workers=2, strategy="allreduce", out=tmp_path, launcher=launcher, epochs=6, threads=1)
    line = next(line for line in report_lines(result) if line.startswith("  input"))
    assert "waited for input in" in line
    assert "with --data-servers" in line
    assert result.input["processor_share"] < 0.5
    assert result.input["seconds_per_example"] > 0.004

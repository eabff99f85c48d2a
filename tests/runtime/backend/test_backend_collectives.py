"""The backend's collectives on real processes: every operation, dtype, size and layout, at worlds of 2 to 5."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_cases.running import digests_of

from offbeat.runtime.launch import Launcher


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "aaaaa", "ab", "aab"])
def test_every_collective_gives_every_rank_the_right_values(launcher: Launcher, tmp_path: Path, hosts: str) -> None:
    digests_of(launcher, tmp_path, "collectives", len(hosts), hosts=hosts)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 5])
def test_rows_are_mixed_by_every_graph_to_the_same_bits_compiled_and_interpreted(
    launcher: Launcher, tmp_path: Path, size: int
) -> None:
    compiled, interpreted = (digests_of(launcher, tmp_path, "mixing", size, native=native) for native in (True, False))
    assert compiled == interpreted
    assert len(set(compiled.values())) == 3  # Two cases share nothing but an empty digest.


def test_two_runs_give_the_same_bits(launcher: Launcher, tmp_path: Path) -> None:
    cases = ("the_same_sum_has_the_same_bits_each_time", "coalesced_calls")
    first, second = (digests_of(launcher, tmp_path, "collectives", 3, *cases) for _ in range(2))
    assert first == second

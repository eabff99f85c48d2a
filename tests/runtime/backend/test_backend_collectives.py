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


def test_two_runs_give_the_same_bits(launcher: Launcher, tmp_path: Path) -> None:
    cases = ("the_same_sum_has_the_same_bits_each_time", "coalesced_calls")
    first, second = (digests_of(launcher, tmp_path, "collectives", 3, *cases) for _ in range(2))
    assert first == second

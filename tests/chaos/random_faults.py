"""Random kills and stops of workers and servers, on real processes: a hundred in `make chaos`, one in `make test`.

Others than those: `CHAOS_SEEDS=2000:2500 make chaos`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fault_runs import random_gossip, random_schedule, survive, survive_gossip

from offbeat.runtime.launch import Launcher

FIRST, LAST = map(int, os.environ.get("CHAOS_SEEDS", "1000:1100").split(":"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_nothing_is_lost_doubled_or_left_behind(seed: int, launcher: Launcher, tmp_path: Path) -> None:
    survive(random_schedule(seed), launcher, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, FIRST + (LAST - FIRST) // 4))
def test_gossip_goes_on_with_those_who_live(seed: int, launcher: Launcher, tmp_path: Path) -> None:
    survive_gossip(random_gossip(seed), launcher, tmp_path)

"""Groups of ranks on real processes: made in any order, used side by side, ended and begun again."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from backend_cases.running import digests_of
from torch.distributed import distributed_c10d as c10d

from offbeat.runtime.backend import stand_in_for_gloo
from offbeat.runtime.launch import Launcher


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "aaaa", "aab"])
def test_groups_do_not_get_in_each_others_way(launcher: Launcher, tmp_path: Path, hosts: str) -> None:
    digests_of(launcher, tmp_path, "groups", len(hosts), hosts=hosts)


def test_a_group_in_the_place_of_gloo_learns_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupGloo", c10d.ProcessGroupGloo)
    stand_in_for_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        c10d._set_pg_timeout(timedelta(seconds=7))
        group: Any = dist.group.WORLD
        assert group._calls.patience() == 7.0
    finally:
        dist.destroy_process_group()

"""Groups of ranks on real processes: made in any order, used side by side, ended and begun again."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_cases.running import digests_of
from offbeat.runtime.launch import Launcher


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "aaaa", "aab"])
def test_groups_do_not_get_in_each_others_way(launcher: Launcher, tmp_path: Path, hosts: str) -> None:
    digests_of(launcher, tmp_path, "groups", len(hosts), hosts=hosts)

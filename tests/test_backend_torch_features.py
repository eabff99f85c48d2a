"""What torch builds on a backend, unchanged, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_cases.running import digests_of
from offbeat.runtime.launch import Launcher


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aaaa", "ab"])
def test_what_torch_builds_on_a_backend_runs_unchanged(launcher: Launcher, tmp_path: Path, hosts: str) -> None:
    digests_of(launcher, tmp_path, "features", len(hosts), hosts=hosts)

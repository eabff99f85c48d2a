"""A hundred snapshots at random moments of runs that go on, with kills; `make test` takes one.

Every one is certified, and a run that goes on from it has nothing lost or doubled. Others than those:
`CHAOS_SNAPSHOTS=5000 make chaos`.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
from snapshot_runs import goes_on, photographed, random_scene

from offbeat.runtime.launch import Launcher

FIRST = int(os.environ.get("CHAOS_SNAPSHOTS", "2000"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("part", "wanted"), [(0, 1), (0, 25), (1, 25), (2, 25), (3, 25)])
def test_snapshots_are_certified_and_lose_and_double_nothing(
    part: int, wanted: int, launcher: Launcher, tmp_path: Path
) -> None:
    taken = 0
    for seed in count(FIRST + 1000 * part):
        scene, folder = random_scene(seed), tmp_path / str(seed)
        folder.mkdir()
        for snapshot in photographed(scene, launcher, folder):
            goes_on(snapshot, scene, launcher, folder)
            taken += 1
            if taken == wanted:
                return

"""Sums by whichever algorithm was fastest: right for every size and kind, and the same choice on every worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from own_scripts.choosing import COUNTS, KINDS

from offbeat.runtime.gradients.algorithm_choice import size_class
from offbeat.runtime.launch import Launcher, Role, serve_store, worker_environment


def go(launcher: Launcher, folder: Path, workers: int) -> list[dict[str, Any]]:
    """What each worker has seen."""
    store = serve_store()
    roles = [
        Role(
            kind="worker",
            rank=rank,
            entry="own_scripts.choosing:run",
            config={},
            environment=worker_environment(rank, workers, store.port),
            log=folder / f"{rank}.log",
            threads=1,
        )
        for rank in range(workers)
    ]
    seen: dict[int, dict[str, Any]] = {}

    def note(role: Role, message: Mapping[str, Any]) -> None:
        del role
        seen[message["rank"]] = dict(message["seen"])

    launcher.run(roles, on_message=note)
    return [seen[rank] for rank in range(workers)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_auto_sums_every_size_rightly_among_sums_by_others(launcher: Launcher, tmp_path: Path, workers: int) -> None:
    found = go(launcher, tmp_path, workers)
    kinds = {str(size_class(count * dtype.itemsize)) for dtype in KINDS for count in COUNTS}
    for one in found:
        assert one["wrong"] == []
        assert set(one["choices"]) == kinds
        assert one["choices"] == found[0]["choices"]

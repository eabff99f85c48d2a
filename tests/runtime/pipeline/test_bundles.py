"""Bundles of tensors arrive as they were sent, also where their shapes are not those of the last time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bundle_entries import SHAPES

from offbeat.runtime.launch import Launcher, Role, serve_store, worker_environment


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"])
def test_bundles_whose_shapes_change_arrive(launcher: Launcher, tmp_path: Path, native: str) -> None:
    store = serve_store()
    heard: list[dict[str, Any]] = []
    roles = [
        Role(
            "worker",
            rank,
            "bundle_entries:exchange",
            {},
            {**worker_environment(rank, 2, store.port), "OFFBEAT_NATIVE": native},
            tmp_path / f"{rank}.log",
        )
        for rank in range(2)
    ]
    launcher.run(roles, on_message=lambda _, message: heard.append(dict(message)))
    assert heard == [{"right": [True] * 2 * len(SHAPES), "marks": native == "1"}]

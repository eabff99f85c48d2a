"""Split losses, logits and attention equal torch's own, and their gradients, on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import split_parts

from offbeat.runtime.launch import Launcher, Role, serve_store, worker_environment


def on_ways(launcher: Launcher, folder: Path, ways: int, entry: str) -> list[dict[str, Any]]:
    store, reports = serve_store(), list[dict[str, Any]]()
    name = f"{split_parts.__name__}:{entry}"
    roles = [
        Role("worker", rank, name, {}, worker_environment(rank, ways, store.port), folder / f"{rank}", 1)
        for rank in range(ways)
    ]
    launcher.run(roles, on_message=lambda _role, message: reports.append(dict(message)))
    return reports


def test_losses_are_torchs_and_only_unusual_ones_gather_logits(launcher: Launcher, tmp_path: Path) -> None:
    reports = on_ways(launcher, tmp_path, 3, "losses")
    refused = [report for report in reports if "refused" in report]
    assert len(refused) == 3
    assert "an embedding of 9 rows was asked for rows 9 to 9" in refused[0]["refused"]
    found = [report for report in reports if "loss" in report]
    assert len(found) == 3 * len(split_parts.SPLIT_LOSSES | split_parts.GATHERED)
    for report in found:
        assert report["apart"] < (1e-6 if report["loss"] == "last" else 1e-12), report
        assert bool(report["gathered"]) is (report["loss"] in split_parts.GATHERED), report


def test_attention_by_heads_is_torchs_in_all_its_forms(launcher: Launcher, tmp_path: Path) -> None:
    reports = on_ways(launcher, tmp_path, 2, "attention")
    assert len(reports) == 2 * len(split_parts.CASES)
    for report in reports:
        assert report["apart"] < 1e-12, report


def test_a_split_model_is_whole_for_a_while_with_its_optimizer(launcher: Launcher, tmp_path: Path) -> None:
    for report in on_ways(launcher, tmp_path, 2, "copies"):
        assert report["shapes"] == report["after"] == [[3, 4], [3], [4, 3], [4]]
        assert report["whole"] == report["state"] == [[6, 4], [6], [4, 6], [4]]
        assert report["inside"] == 0
        assert report["outside"] < 1e-12

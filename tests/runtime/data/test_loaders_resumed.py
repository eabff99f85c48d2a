"""Loaders of a resumed run: they go on with exactly the batches that were left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_loaders import KINDS, SIZE, Batches, Feed, Make, Noisy, Stream, _given_generator, rows
from torch.utils.data import DataLoader, TensorDataset

from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.data.loaders import Loader, Share, divide
from offbeat.runtime.state.random_state import capture, seed_everything

RESUMED: dict[str, Make] = {
    "generator": _given_generator,
    "noise": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "sampler": KINDS["sampler"],
    "stream": KINDS["stream"],
    "factory": Batches,
    "finished": KINDS["finished_batches"],
    "whole": lambda: DataLoader(TensorDataset(torch.arange(SIZE)), 4, shuffle=True),
    "processes": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, generator=torch.Generator()),
    "persistent": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "stream processes": lambda: DataLoader(Stream(), 4, num_workers=2, persistent_workers=True),
}


LIVING_ON = ("persistent", "stream processes")
"""Loading processes of one worker that live on draw on from the epoch before, as without a team: none resumes them."""


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, size) for kind in RESUMED for size in (1, 2) if kind not in LIVING_ON),
        # Torch waits up to 5 s for each process that lived on, when their loader is collected.
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in LIVING_ON),
    ],
)
def test_a_resumed_loader_goes_on_with_exactly_the_rest(kind: str, size: int) -> None:
    """A run of three epochs is left at batch 2 of the second; a fresh loader fast-forwards and goes on."""
    seed_everything(8)

    def start(feed: Feed) -> Loader:
        return divide(RESUMED[kind](), [Share(size - 1, size, 5, 0)], feed, Parts(), split=kind != "whole")

    loader, rest, feed, state = start(Feed()), [], Feed(), {}
    for epoch in range(1, 4):
        for content in loader:
            torch.rand(())  # As dropout does, between two batches.
            if state:
                rest.append(rows(content))
            elif (epoch, loader.batches) == (2, 2):
                state, feed.random_state = loader.state_dict(), capture()
    fresh = start(feed)
    fresh.load_state_dict(state)
    assert fresh.state_dict()["batches"] == 2, "a checkpoint before the loader is reached keeps its place"
    got: list[Any] = []
    for _ in range(3):
        for content in fresh:
            torch.rand(())
            got.append(rows(content))
    assert got == rest
    assert len(rest) == 2 * loader.batches - 2
    assert (fresh.epoch, fresh.complete, feed.random_state) == (3, True, None)


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    loader = divide(_given_generator(), [Share(0, 2, 5, 0)], Feed(), Parts())
    list(loader)
    states = loader.state_dict(at_end=True), loader.state_dict()
    expected = [rows(content) for content in loader]
    for state in states:
        fresh = divide(_given_generator(), [Share(0, 2, 5, 0)], Feed(), Parts())
        fresh.load_state_dict(state)
        assert list(fresh) == []
        assert [rows(content) for content in fresh] == expected

"""What messages between neighbouring stages take, measured before the first step by a few that go there and back."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.hosts.link_probe import DEAR, LARGER, MOST, SMALLEST
from offbeat.runtime.pipeline.messages import Bundles

TRIAL_TAG = (1 << 20) - 1
"""Tag of these messages, between those of bundles and those of tied parameters."""
_TIMES = 3
_WHAT = "measuring the links between stages"


class MessageTrial(NamedTuple):
    """A message from a stage to the next, or back."""

    stage: int
    nbytes: int
    seconds: float


def measured_messages(group: DirectGroup, bundles: Bundles, most: int) -> list[MessageTrial]:
    """Messages of growing size up to `most` bytes, between each stage and the next. Collective."""
    trials: list[MessageTrial] = []
    most = min(max(most, 1), MOST)
    size = min(SMALLEST, most)
    with group.sent.measuring():
        while True:
            own = 0.0
            for stage in range(group.size - 1):
                if group.rank in (stage, stage + 1):
                    # The shortest, because other load only adds to it.
                    taken = min(_there_and_back(group, bundles, stage, size) for _ in range(_TIMES))
                    own = taken / 2 if group.rank == stage else own
                group.barrier(_WHAT)
            seconds = group.gather([own], _WHAT)[:-1, 0].tolist()
            trials += [MessageTrial(stage, size, max(1e-9, each)) for stage, each in enumerate(seconds)]
            following = min(size * LARGER, most)
            if following <= size or max(seconds) * following / size > DEAR:
                return trials
            size = following


def _there_and_back(group: DirectGroup, bundles: Bundles, stage: int, size: int) -> float:
    """Seconds that a message takes to the next stage and back."""
    begins = group.rank == stage
    peer = stage + 1 if begins else stage
    coming = bundles.post_back([(torch.uint8, (size,))], peer, TRIAL_TAG, _WHAT)
    row = torch.zeros(size, dtype=torch.uint8)
    began = time.perf_counter()
    if begins:
        bundles.send_back([row], peer, TRIAL_TAG)
    (came,) = coming.wait()
    if not begins:
        bundles.send_back([came], peer, TRIAL_TAG)
    return time.perf_counter() - began

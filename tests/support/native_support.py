"""What tests of the compiled executor share."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest

from offbeat.runtime.collectives.one_sided.arena import Arena
from offbeat.runtime.collectives.one_sided.segment import SegmentError

needed = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on this machine")


def explain(why: str, peers: Sequence[int]) -> Exception:
    return SegmentError(f"{why} {peers}")


def alone() -> Arena:
    return Arena(Arena.create(1), 0, (0,), explain)

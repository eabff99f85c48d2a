"""Messages from rank to rank on real processes: tags, any source, batches, and beside collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_cases.running import digests_of

from offbeat.runtime.launch import Launcher


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 5])
def test_every_message_arrives_where_and_when_it_should(launcher: Launcher, tmp_path: Path, size: int) -> None:
    digests_of(launcher, tmp_path, "transfers", size)

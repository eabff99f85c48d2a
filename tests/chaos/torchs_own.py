"""Torch's own tests of distributed CPU backends, on ours in Gloo's place.

As a program (`WORLD_SIZE=4 TEMP_DIR=... python tests/chaos/torchs_own.py`) it is one of torch's test programs; its
tests ask for Gloo by name, and get ours. What needs a GPU, MPI or NCCL they skip themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [3, 8])
def test_torchs_own_tests_of_cpu_backends_pass(ranks: int, tmp_path: Path) -> None:
    environment = os.environ | {"WORLD_SIZE": str(ranks), "TEMP_DIR": str(tmp_path)}
    environment |= {"BACKEND": "gloo", "INIT_METHOD": "env://"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, timeout=840
    )
    assert found.returncode == 0, found.stderr[-4000:]
    counts = re.search(r"Ran (\d+) tests.*\n\nOK \(skipped=(\d+)\)", found.stderr)
    assert counts is not None, found.stderr[-4000:]
    assert int(counts[1]) - int(counts[2]) >= 80, counts[0]


def main() -> None:
    import torch
    import torch.distributed as dist

    import offbeat
    from offbeat.runtime.backend import OffbeatGroup, stand_in_for_gloo

    assert offbeat.__version__
    torch.set_num_threads(1)
    stand_in_for_gloo()
    import torch.testing._internal.distributed.distributed_test as stock
    from torch.testing._internal.common_utils import run_tests

    kinds: Any = (stock.TestDistBackend, stock.DistributedTest._DistTestBase)

    class OnOurs(*kinds):
        def setUp(self) -> None:
            super().setUp()
            # Torch's would start each rank anew, which takes most of the time.
            self._start_processes(multiprocessing.get_context("fork").Process)

        def test_the_group_is_ours(self) -> None:
            assert isinstance(dist.group.WORLD, OffbeatGroup)

    sys.modules["__main__"].OnOurs = OnOurs  # pyright: ignore[reportAttributeAccessIssue]
    OnOurs.__module__ = "__main__"
    run_tests()


if __name__ == "__main__":
    os.environ.setdefault("BACKEND", "gloo")
    main()

"""Torch's own tests of distributed CPU backends, on ours: in Gloo's place, and under its own name.

As a program (`WORLD_SIZE=4 TEMP_DIR=... python tests/chaos/torchs_own.py offbeat`) it is one of torch's test programs.
What needs a GPU, MPI or NCCL they skip themselves. `make test` runs a few of them, `make chaos` all.
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

FEW = ("-k", "monitored_barrier_gloo_subgroup", "-k", "test_all_reduce_sum", "-k", "the_group_is_ours")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "ranks", "which"),
    [("offbeat", 2, "few"), *((name, ranks, "all") for name in ("gloo", "offbeat") for ranks in (2, 3, 4, 8))],
)
def test_torchs_own_tests_of_cpu_backends_pass(name: str, ranks: int, which: str, tmp_path: Path) -> None:
    environment = os.environ | {"WORLD_SIZE": str(ranks), "TEMP_DIR": str(tmp_path)}
    environment |= {"BACKEND": "gloo", "INIT_METHOD": "env://"}
    environment.pop("CI", None)  # Torch's runner would want a reporter in XML.
    command = [sys.executable, "-W", "ignore", __file__, name, *(FEW if which == "few" else ())]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1740)
    assert found.returncode == 0, found.stderr[-4000:]
    counts = re.search(r"Ran (\d+) tests.*\n\nOK(?: \(skipped=(\d+)\))?", found.stderr)
    assert counts is not None, found.stderr[-4000:]
    assert int(counts[1]) - int(counts[2] or 0) >= (4 if which == "few" else 80), counts[0]


def main(name: str) -> None:
    import torch
    import torch.distributed as dist

    import offbeat
    from offbeat.runtime.backend import OffbeatGroup, stand_in_for_gloo

    assert offbeat.__version__
    torch.set_num_threads(1)
    if name == "gloo":
        stand_in_for_gloo()
    import torch.testing._internal.distributed.distributed_test as stock
    from torch.testing._internal.common_utils import run_tests

    # Only now: what is to be run was decided for Gloo.
    stock.BACKEND = name  # pyright: ignore[reportAttributeAccessIssue]
    kinds: Any = (stock.TestDistBackend, stock.DistributedTest._DistTestBase)

    class OnOurs(*kinds):
        def setUp(self) -> None:
            super().setUp()
            # Torch's would start each rank anew, which takes most of the time.
            self._start_processes(multiprocessing.get_context("fork").Process)

        def test_the_group_is_ours(self) -> None:
            assert isinstance(dist.group.WORLD, OffbeatGroup)
            assert dist.get_backend() == name

    if name != "gloo":
        for test in dir(OnOurs):
            if test.startswith("test_accumulate_gradients_no_sync"):
                setattr(OnOurs, test, None)  # They know no other names than Gloo's, MPI's and NCCL's.
    sys.modules["__main__"].OnOurs = OnOurs  # pyright: ignore[reportAttributeAccessIssue]
    OnOurs.__module__ = "__main__"
    run_tests()


if __name__ == "__main__":
    os.environ.setdefault("BACKEND", "gloo")
    main(sys.argv.pop(1))

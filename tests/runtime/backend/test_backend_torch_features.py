"""What torch builds on a backend, unchanged, on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from backend_cases.running import digests_of

from offbeat.runtime.launch import Launcher


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aaaa", "ab"])
def test_what_torch_builds_on_a_backend_runs_unchanged(launcher: Launcher, tmp_path: Path, hosts: str) -> None:
    digests_of(launcher, tmp_path, "features", len(hosts), hosts=hosts)


UNCHANGED = """
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

def functions():
    places = (dist, c10d, DistributedDataParallel)
    return {(place.__name__, name): value for place in places for name, value in vars(place).items() if callable(value)}

before = functions()
import offbeat
from offbeat.runtime.backend import register
register()
assert "OFFBEAT" in dist.Backend._plugins
assert functions() == before, "import offbeat has replaced functions of torch"
dist.init_process_group("offbeat", store=dist.HashStore(), rank=0, world_size=1)
changed = sorted(name for name, value in functions().items() if before.get(name) is not value)
print(*(name for _, name in changed))
"""


def test_importing_offbeat_replaces_nothing_in_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", UNCHANGED], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    # Only a group of ours does, and only what docs/backend.md says.
    assert set(ended.stdout.split()) == {"monitored_barrier", "_register_builtin_comm_hook"}

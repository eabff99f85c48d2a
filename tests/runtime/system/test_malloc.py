"""Freed memory stays with the process: what a step allocates again is not cleared by the system again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from offbeat.runtime.system.malloc import keep_freed_memory

print(keep_freed_memory() if sys.argv[1] == "keep" else "left alone")
def touch():
    held = [torch.ones(5_000_000) for _ in range(4)]
for _ in range(3):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(what: str, **environment: str) -> tuple[str, int]:
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], env=cleared | environment, capture_output=True, text=True, check=True
    )
    said, count = done.stdout.split("\n")[:2]
    return said, int(count)


@pytest.mark.slow
def test_memory_that_was_freed_is_there_at_once() -> None:
    said, few = faults("keep")
    assert said == "True"
    _, many = faults("leave", MALLOC_MMAP_THRESHOLD_="131072")  # As it is by default before a first piece is freed.
    assert few * 10 < many, f"{few} page faults with kept memory, {many} without"


EXCESS = """
import torch
from offbeat.runtime.system.malloc import give_back_excess, keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep_freed_memory()
held = [torch.ones(5_000_000) for _ in range(10)]
full = resident()
del held
print(full - resident() < 50_000_000, give_back_excess(most=1 << 50), give_back_excess(most=100_000_000))
print(full - resident() > 150_000_000)
"""


@pytest.mark.slow
def test_what_is_kept_in_excess_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", EXCESS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True", "True"]


@pytest.mark.slow
def test_what_the_user_has_set_stays() -> None:
    said, _ = faults("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert said == "False"
    said, _ = faults("keep", GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072")
    assert said == "False"

"""Facts for a bug report: the machine, versions, limits, and whether two processes can rendezvous."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offbeat.errors import OffbeatError
from offbeat.runtime.backend import _fast_path
from offbeat.runtime.collectives.messages import channels
from offbeat.runtime.collectives.one_sided import native
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.hosts import why_not
from offbeat.runtime.launch import Control, Launcher, Role, private_store, worker_environment
from offbeat.runtime.run.folder import environment
from offbeat.runtime.run.rank_environment import where

_PACKAGES = ("torch", "numpy", "msgspec", "safetensors", "typer", "rich", "tensorboard")
_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"),
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_JOB_ID"),
)


def facts() -> dict[str, Any]:
    """Facts about this machine that have explained failures."""
    known, page = environment(), os.sysconf("SC_PAGE_SIZE")
    return {
        **{name: known[name] for name in ("offbeat", "python", "platform", "processor")},
        "libc": " ".join(platform.libc_ver()),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cores": {"usable": known["cores"], "all": os.cpu_count(), "load": [round(x, 2) for x in os.getloadavg()]},
        "torch_threads": torch.get_num_threads(),
        "backends": {
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "mpi": dist.is_mpi_available(),
            "cuda": torch.cuda.is_available(),
        },
        "memory_gib": {
            "all": _gib(os.sysconf("SC_PHYS_PAGES") * page),
            "free": _gib(os.sysconf("SC_AVPHYS_PAGES") * page),
        },
        "shared_memory_gib": _gib(shutil.disk_usage("/dev/shm").free) if Path("/dev/shm").exists() else None,  # noqa: S108
        "compiled_executor": native.state(),
        "compiled_calls": _fast_path.state(),
        "compiled_messages": "in use" if channels.library() is not None else "no: messages go over Gloo",
        "temporary_disk_gib": _gib(shutil.disk_usage(tempfile.gettempdir()).free),
        "hosts": {"namespaces": why_not() or "can be made"},
        "limits": {
            "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
            "processes": list(resource.getrlimit(resource.RLIMIT_NPROC)),
        },
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def self_test(launcher: Launcher) -> dict[str, Any]:
    """Let two processes rendezvous on loopback and all-reduce; returns the outcome and its time."""
    start = time.monotonic()
    heard: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="offbeat-doctor-") as folder, private_store() as store:
            entry, places = "offbeat.runtime.system.doctor:meet", [worker_environment(r, 2, store) for r in range(2)]
            roles = [Role("worker", r, entry, {}, places[r], Path(folder) / f"{r}.log", 1) for r in range(2)]
            launcher.run(roles, on_message=lambda _, message: heard.append(message))
    except OffbeatError as error:
        return {"ok": False, "error": str(error), "seconds": time.monotonic() - start}
    correct = sorted(message["sum"] for message in heard) == [3.0, 3.0]
    times = [message["microseconds"] for message in heard]
    return {"ok": correct, "seconds": time.monotonic() - start, "small_sum_microseconds": min(times, default=None)}


def meet(config: Mapping[str, Any], control: Control) -> None:
    """The entry function of the self-test's processes."""
    del config
    group = DirectGroup(where(), timedelta(seconds=30), torch.device("cpu"))
    total = group.sum(torch.tensor([group.rank + 1.0]), "the self-test")
    start = time.perf_counter()
    for _ in range(20):
        group.barrier("the self-test")
    control.send({"sum": float(total), "microseconds": (time.perf_counter() - start) / 20 * 1e6})
    group.close()


def _gib(count: int) -> float:
    return round(count / 2**30, 2)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

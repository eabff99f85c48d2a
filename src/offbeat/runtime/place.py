"""Where this process stands among the others: the one place that reads what a launcher left in the environment.

offbeat's own launcher sets the same variables as torchrun, so that any script for torchrun works under it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from offbeat.errors import UsageError

_SLURM_FIRST_PORT, _SLURM_PORTS = 20000, 10000


@dataclass(frozen=True)
class Place:
    """One worker's position, and how to reach the others."""

    launcher: Literal["alone", "torchrun", "slurm"] = "alone"
    """Whose variables were found; offbeat's launcher sets torchrun's."""
    rank: int = 0
    """This worker's number, from 0."""
    size: int = 1
    """How many workers there are."""
    local_rank: int = 0
    """This worker's number on its host."""
    local_size: int = 1
    """How many workers are on this host."""
    address: str = "127.0.0.1"
    """The host of the rendezvous store."""
    port: int = 0
    """Its port; 0 if there is nobody to meet."""


def where(environment: Mapping[str, str] | None = None) -> Place:
    """Read the place from the environment: torchrun's variables, then Slurm's, else alone."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if (
        "SLURM_PROCID" in env
        and _number(env, "SLURM_NTASKS", 1) > 1
        and env.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    ):
        return _from_slurm(env)
    return Place()


def _from_torchrun(env: Mapping[str, str]) -> Place:
    size = _number(env, "WORLD_SIZE", 1)
    if size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise UsageError(
            "RANK and WORLD_SIZE are set but MASTER_ADDR or MASTER_PORT is not, so the workers cannot meet. "
            "Start the script with `offbeat run` or `torchrun`, or set all four."
        )
    return Place(
        launcher="torchrun",
        rank=_number(env, "RANK", 0),
        size=size,
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_size=_number(env, "LOCAL_WORLD_SIZE", size),
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(env, "MASTER_PORT", 0),
    )


def _from_slurm(env: Mapping[str, str]) -> Place:
    size = _number(env, "SLURM_NTASKS", 1)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = _number(env, "SLURM_JOB_ID", 0)
    return Place(
        launcher="slurm",
        rank=_number(env, "SLURM_PROCID", 0),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        # SLURM_TASKS_PER_NODE reads like "4(x2),3"; the first number is right for even layouts.
        local_size=int(re.match(r"\d+", env.get("SLURM_TASKS_PER_NODE", str(size)) or "1")[0]),  # pyright: ignore[reportOptionalSubscript]
        address=env.get("MASTER_ADDR") or first_host(nodes),
        port=_number(env, "MASTER_PORT", _SLURM_FIRST_PORT + job % _SLURM_PORTS),
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],cpu1` begins with `gpu07`."""
    head = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if head is None:
        raise UsageError(f"Slurm's node list {nodes!r} cannot be read. Set MASTER_ADDR to the first host's name.")
    return head[1] + (head[2] or "")


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"The environment says {name}={text!r}, which is no number. Unset or mend it.") from None

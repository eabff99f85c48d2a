"""A worker's rank and rendezvous address: the only place that reads the launcher's environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from offbeat import limits
from offbeat.errors import UsageError

STORE = "OFFBEAT_STORE"  # The variable with the file of the launcher's private store.
_SLURM_FIRST_PORT, _SLURM_PORTS = 20000, 10000


@dataclass(frozen=True)
class Place:
    """One worker's position, and the rendezvous with the others."""

    launcher: Literal["alone", "torchrun", "slurm"] = "alone"
    """Whose variables were set; offbeat's launcher sets torchrun's."""
    rank: int = 0  # From 0.
    size: int = 1  # Number of workers.
    local_rank: int = 0  # Rank among the workers of its host.
    local_size: int = 1  # Number of workers on this host.
    address: str = "127.0.0.1"  # The host of the rendezvous store.
    port: int = 0  # Its port; 0 for a single worker.
    store: str | None = None
    """The file of the launcher's private store, used instead of that port; None: torch's own store."""


def where(environment: Mapping[str, str] | None = None) -> Place:
    """The place given by torchrun's variables, or Slurm's; otherwise a single worker."""
    env = os.environ if environment is None else environment
    present = [name for name in ("RANK", "WORLD_SIZE") if env.get(name)]
    if len(present) == 1:
        raise UsageError(
            f"The environment says {present[0]}={env[present[0]]!r}, but of RANK and WORLD_SIZE a worker needs both, "
            f"so it is unclear who else takes part. Set the other too, or unset {present[0]}."
        )
    if present:
        return _checked(_from_torchrun(env))
    if (
        "SLURM_PROCID" in env
        and _number(env, "SLURM_NTASKS", 1) > 1
        and env.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    ):
        return _checked(_from_slurm(env))
    return Place()


def _checked(place: Place) -> Place:
    limits.whole("The environment's number of workers,", max(1, place.size), limits.WORLD)
    if not 0 <= place.rank < place.size or not 0 <= place.local_rank < place.local_size or not 0 <= place.port < 2**16:
        raise UsageError(
            f"The environment describes no possible place: worker {place.rank} of {place.size}, number "
            f"{place.local_rank} of {place.local_size} on its host, meeting at port {place.port}. Numbers begin at 0 "
            f"and stay below the count. Fix the variables of the launcher ({place.launcher})."
        )
    return place


def _from_torchrun(env: Mapping[str, str]) -> Place:
    size = _number(env, "WORLD_SIZE", 1)
    if size > 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
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
        address=env.get("MASTER_ADDR") or "127.0.0.1",
        port=_number(env, "MASTER_PORT", 0),
        store=env.get(STORE) or None,
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
        local_size=_tasks_here(env, size),
        address=env.get("MASTER_ADDR") or first_host(nodes),
        port=_number(env, "MASTER_PORT", _SLURM_FIRST_PORT + job % _SLURM_PORTS),
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu07` for `gpu[07-09,12],cpu1`."""
    first = re.match(r"(?:[^\[\],]|\[[^\[\]]+\])+(?=,|$)", nodes.strip())
    if first is None:
        raise UsageError(f"Slurm's node list {nodes!r} cannot be read. Set MASTER_ADDR to the first host's name.")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _tasks_here(env: Mapping[str, str], size: int) -> int:
    """Number of tasks on this node, from a list like `4(x2),3`."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    node = _number(env, "SLURM_NODEID", 0)
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise UsageError(f"The environment says SLURM_TASKS_PER_NODE={text!r}, which is not a list like 4(x2),3.")
        repeated = match[2] or "1"
        if len(repeated) > 6 or len(match[1]) > 6:
            raise UsageError(f"The environment says SLURM_TASKS_PER_NODE={text!r}: more than a million makes no sense.")
        counts += [int(match[1])] * int(repeated)
    return counts[node] if 0 <= node < len(counts) else counts[0]


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"The environment says {name}={text!r}, which is not a number. Unset or fix it.") from None

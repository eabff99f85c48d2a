"""Which machines a run takes, and how many workers each gets: as even a share of its cores as there is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import UsageError, did_you_mean
from offbeat.runtime.hosts import Host, Hosts

LOCAL = "local"
ENGINES = (LOCAL, "ray", "slurm")


@dataclass(frozen=True)
class ClusterMachine:
    """A machine that an engine has."""

    address: str
    """By which the engine knows it."""
    cores: int
    """Cores that a run may use."""
    memory: int = 0
    """Bytes of memory; 0 if the engine does not say."""


def hosts_on(on: Hosts | str | Path | None, workers: int | None) -> Hosts | None:
    """The hosts that `--on` names; None: this machine alone."""
    if on is None or isinstance(on, Hosts):
        return on
    text = str(on)
    if text == LOCAL:
        return None
    if text == "ray" or text.startswith("ray://"):
        from offbeat.runtime.engines.ray import ray_machines

        return shared_out(ray_machines(text), workers, "ray", text)
    if text == "slurm":
        from offbeat.runtime.engines.slurm import slurm_machines

        return shared_out(slurm_machines(), workers, "slurm", text)
    if isinstance(on, str) and re.fullmatch(r"[a-z]+(://.*)?", text) and not Path(text).exists():
        raise UsageError(
            f"--on {text}: there is no such engine, and no such file.{did_you_mean(text.partition(':')[0], ENGINES)} "
            f"A cluster of Ray is ray or ray://ADDRESS; machines behind ssh are in a file, see docs/hosts.md."
        )
    return Hosts.read(Path(on))


def shared_out(machines: Sequence[ClusterMachine], workers: int | None, kind: str, cluster: str) -> Hosts:
    """Hosts of a cluster's machines, with workers by cores; without a number, one on each machine."""
    if not machines:
        raise UsageError(f"--on {cluster}: the cluster has no machine that is alive. Start one, or run without --on.")
    most = len(machines) if workers is None else workers
    counts = [0] * len(machines)
    for _ in range(most):
        # The machine on which one more has the largest share of the cores; of equal ones, the first.
        counts[max(range(len(machines)), key=lambda n: (machines[n].cores / (counts[n] + 1), -n))] += 1
    return Hosts(
        tuple(
            Host(f"{kind}-{number}", workers=count, kind=kind, address=machine.address)
            for number, (machine, count) in enumerate(zip(machines, counts, strict=True))
            if count
        ),
        cluster=cluster,
    )

"""Machines of a Slurm allocation: each agent is a job step of its own, whose standard input carries its keys."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.errors import UsageError
from offbeat.runtime.engines.command import CommandAgent
from offbeat.runtime.engines.placement import ClusterMachine
from offbeat.runtime.hosts import Hosts

PATIENCE = 20.0
"""Seconds that Slurm's controller has to answer."""
JOB = "SLURM_JOB_ID"


def inside_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in an allocation."""
    return bool(environment.get(JOB))


def slurm_machines() -> list[ClusterMachine]:
    """The nodes of the allocation that this process runs in."""
    if not inside_allocation():
        raise UsageError(
            "--on slurm: this is not in an allocation of Slurm's. `offbeat run` submits a job that is; for the rest, "
            "begin with `salloc --nodes=2`, or write a script for sbatch."
        )
    nodes = _ask("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    cores = cores_of(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""), len(nodes))
    return [ClusterMachine(node, count) for node, count in zip(nodes, cores, strict=True)]


def cores_of(text: str, nodes: int) -> list[int]:
    """The cores of each node of a list like `4(x2),3`; one each if Slurm does not say."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", entry.strip())
        if match is not None:
            counts += [int(match[1])] * int(match[2] or "1")
    return (counts + [1] * nodes)[:nodes]


class SlurmEngine:
    """Starts agents as job steps, one for each node."""

    def __init__(self, hosts: Hosts) -> None:
        if not inside_allocation():
            raise UsageError("--on slurm: this is not in an allocation of Slurm's. Resume it inside one, or with --on.")
        self._nodes = {host.name: host.address or "" for host in hosts.hosts}
        mine = {machine.address for machine in slurm_machines()}
        if missing := [node for node in self._nodes.values() if node not in mine]:
            raise UsageError(f"--on slurm: {', '.join(missing)} is not in this allocation, which has {sorted(mine)}.")

    def reach(self) -> str:
        """The address of the first node, as Slurm knows it."""
        node = next(iter(self._nodes.values()))
        match = re.search(r"NodeAddr=(\S+)", _ask("scontrol", "show", "node", node))
        return node if match is None else match[1]

    def start(self, machine: str, settings: bytes) -> CommandAgent:
        """Start an agent as a job step that shares its node with the job's other steps."""
        node = self._nodes[machine]
        command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mpi=none", "--quiet"]
        command += ["--kill-on-bad-exit=1", sys.executable, "-P", "-m", "offbeat.runtime.agents.agent"]
        return CommandAgent(f"the job step on {node}", command, settings)

    def close(self) -> None:
        """Nothing is held beside the agents: the allocation is the user's."""


def _ask(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"--on slurm: there is no command {words[0]} here. Is this a machine of the cluster?"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"--on slurm: `{shlex.join(words)}` did not answer within {PATIENCE:g} s.") from error
    if done.returncode:
        raise UsageError(f"--on slurm: `{shlex.join(words)}` failed: {done.stderr.strip() or done.returncode}.")
    return done.stdout


def batch_script(command: Sequence[str], workers: int | None, options: str) -> str:
    """A script for sbatch that runs a command of ours inside its allocation."""
    try:
        own = shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--sbatch {options!r} cannot be read: {error}.") from error
    if wrong := [word for word in own if not word.startswith("-") or not word.isprintable()]:
        raise UsageError(
            f"--sbatch {options!r}: {wrong[0]!r} is not an option. Write --name=value, e.g. --time=1:00:00."
        )
    if not any(re.match(r"--nodes\b|-N", word) for word in own):
        own.insert(0, f"--nodes={workers or 1}")
    lines = ["#!/bin/bash", "#SBATCH --job-name=offbeat", "#SBATCH --output=offbeat-%j.out"]
    lines += [f"#SBATCH {shlex.quote(word)}" for word in own]
    return "\n".join([*lines, f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)}", ""])


def submit(script: str) -> str:
    """Submit a script; the job's number."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except FileNotFoundError as error:
        raise UsageError("--on slurm: there is no command sbatch here. Is this a machine of the cluster?") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"--on slurm: sbatch did not answer within {PATIENCE:g} s.") from error
    if done.returncode:
        raise UsageError(f"--on slurm: sbatch refused the job: {done.stderr.strip()}.")
    return done.stdout.strip().partition(";")[0]

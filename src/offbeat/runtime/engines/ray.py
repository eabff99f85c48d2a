"""Machines of a Ray cluster: a placement group spreads agents over its nodes, and reserves the workers' cores there.

Ray places agents and tells when one is gone; tensors, messages and files go over offbeat's own planes. The agent's keys
are an argument of its actor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

from offbeat.errors import UsageError
from offbeat.runtime.engines.placement import ClusterMachine
from offbeat.runtime.hosts import Hosts

PATIENCE = 30.0
"""Seconds that the cluster has to find room for all agents."""
CONNECT = 5.0
"""Seconds that a cluster's address has to answer."""
_LONGEST = 2000


class AgentOnNode:
    """An actor that runs an agent as a process of its own on the actor's node; the agent ends with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, settings: bytes) -> str:
        """Run the agent to its end; how it ended."""
        with tempfile.TemporaryFile() as output:
            command = [sys.executable, "-P", "-m", "offbeat.runtime.agents.agent"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
            self._process = process
            assert process.stdin is not None  # noqa: S101 (a pipe)
            process.stdin.write(settings)
            process.stdin.flush()
            code = process.wait()
            output.seek(0)
            said = output.read()[-_LONGEST:].decode(errors="replace").strip()
        return f"its agent ended with exit code {code}" + (f" and said: {said}" if said else "")

    def end(self) -> None:
        """Close the agent's standard input, at which it ends."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(5)


class RayAgent:
    """An agent in an actor."""

    def __init__(self, ray: Any, actor: Any, settings: bytes) -> None:
        self._ray, self._actor = ray, actor
        self._running = actor.run.remote(settings)

    def ended(self) -> str | None:
        """How the actor or its agent has ended; None while it runs."""
        done, _ = self._ray.wait([self._running], timeout=0)
        if not done:
            return None
        try:
            return str(self._ray.get(self._running))
        except self._ray.exceptions.RayError as error:
            return f"Ray says: {str(error).strip()[:_LONGEST]}"

    def end(self) -> None:
        """End the agent, and its actor."""
        with contextlib.suppress(Exception):  # Of a node that is gone; the actor is killed in any case.
            self._ray.get(self._actor.end.remote(), timeout=5)
        self._ray.kill(self._actor)


class RayEngine:
    """Starts agents in actors of a placement group that has a bundle on a node of its own for each machine."""

    def __init__(self, hosts: Hosts) -> None:
        self._ray = ray = connected(hosts.cluster)
        self._places = {host.name: number for number, host in enumerate(hosts.hosts)}
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        if len(nodes) < len(hosts.hosts):
            raise UsageError(
                f"--on {hosts.cluster}: the run needs {len(hosts.hosts)} machines, the cluster has {len(nodes)}. Add "
                f"nodes, or ask for fewer workers."
            )
        self._address = next(iter(nodes.values()))["NodeManagerAddress"]
        cores = sorted((_cores(node) for node in nodes.values()), reverse=True)
        self._bundles = [
            {"CPU": float(max(1, min(host.workers, most)))} for host, most in zip(hosts.hosts, cores, strict=False)
        ]
        from ray.util import placement_group  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        self._group: Any = placement_group(self._bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(PATIENCE):
            self.close()
            raise UsageError(
                f"--on {hosts.cluster}: no room for {len(self._bundles)} machines with {self._bundles} within "
                f"{PATIENCE:g} s; others may use the cluster. Wait for them (`ray status`), or ask for fewer workers."
            )

    def reach(self) -> str:
        """The address of a node."""
        return self._address

    def start(self, machine: str, settings: bytes) -> RayAgent:
        """Start an agent in an actor of its own."""
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            PlacementGroupSchedulingStrategy,  # pyright: ignore[reportUnknownVariableType]
        )

        number = self._places[machine]
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        options = {"num_cpus": self._bundles[number]["CPU"], "scheduling_strategy": where, "max_concurrency": 2}
        return RayAgent(self._ray, self._ray.remote(AgentOnNode).options(**options).remote(), settings)

    def close(self) -> None:
        """Give the reserved cores back."""
        from ray.util import remove_placement_group  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        remove_placement_group(self._group)


def ray_machines(text: str) -> list[ClusterMachine]:
    """The nodes of a cluster that are alive."""
    nodes = [node for node in connected(text).nodes() if node["Alive"]]
    return [
        ClusterMachine(node["NodeID"], _cores(node), int(node["Resources"].get("memory", 0)))
        for node in sorted(nodes, key=lambda node: (-_cores(node), node["NodeManagerAddress"], node["NodeID"]))
        if _cores(node)
    ]


def _cores(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("CPU", 0))


def connected(text: str) -> Any:
    """Ray, connected to this cluster; a program that is connected already stays so."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError("--on ray needs Ray: pip install 'offbeat[ray]'.") from error
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS", "auto") if text == "ray" else text
    if address.startswith("ray://"):
        _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"--on {text}: there is no Ray cluster at {address!r} ({str(error).strip().splitlines()[0]}). Start one "
            f"with `ray start --head`, or give its address: --on ray://HOST:10001."
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT).close()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--on {address}: nothing answers there ({error}). Give the address of Ray's client server, such as "
            f"ray://HOST:10001; it needs the extra `ray[client]` on the cluster."
        ) from error

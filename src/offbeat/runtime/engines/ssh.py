"""Machines that are reached by ssh: the agent's keys travel through the encrypted connection's standard input."""

from __future__ import annotations

from offbeat.runtime.engines.command import CommandAgent
from offbeat.runtime.hosts import Host, Hosts

PATIENCE = 15
"""Seconds to connect."""


class SshEngine:
    """Starts agents by the `ssh` command, with the user's own configuration and known hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = {host.name: host for host in hosts.hosts}

    def reach(self) -> str:
        """The address of the first machine."""
        return next(iter(self._hosts.values())).address or ""

    def start(self, machine: str, settings: bytes) -> CommandAgent:
        """Start an agent; it ends with the connection."""
        host = self._hosts[machine]
        return CommandAgent(f"ssh to {host.address}", command(host), settings)

    def close(self) -> None:
        """Nothing is held beside the agents."""


def command(host: Host) -> list[str]:
    """The command that starts the agent of a machine."""
    words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={PATIENCE}"]
    # A connection that is cut is noticed by the agent's heartbeats; these are for one that hangs before.
    words += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"]
    words += ["-p", str(host.port)] if host.port else []
    words += ["-i", host.identity] if host.identity else []
    words += ["-o", f"UserKnownHostsFile={host.known_hosts}"] if host.known_hosts else []
    words += ["-l", host.user] if host.user else []
    return [*words, "--", host.address or "", f"{host.python or 'python3'} -P -m offbeat.runtime.agents.agent"]

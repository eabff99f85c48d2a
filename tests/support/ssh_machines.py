"""Machines for tests: network namespaces of this machine, in each an sshd with keys made for the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import paths

from conftest import wait_until
from offbeat.runtime.hosts import Host, Hosts, Placed, placed

PYTHON = f"env PYTHONPATH={paths.ROOT / 'src'} OMP_NUM_THREADS=1 {sys.executable}"


class SshMachines:
    """Machines that can be reached by ssh from where `placed.inside()` leads."""

    def __init__(self, there: Placed, folder: Path) -> None:
        self.placed, self.folder = there, folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.hosts = Hosts(
            tuple(
                Host(
                    each.host.name, kind="ssh", address=each.address, user="root", port=2222, python=PYTHON,
                    identity=str(folder / "user"), known_hosts=str(folder / "known_hosts"),
                )
                for each in there.hosts
            )
        )  # fmt: skip

    def with_workers(self, *workers: int, servers: tuple[int, ...] = ()) -> Hosts:
        """The machines with these numbers of workers and shares of servers."""
        shares = servers or (0,) * len(workers)
        many = zip(self.hosts.hosts, workers, shares, strict=True)
        return Hosts(tuple(replace(host, workers=count, servers=share) for host, count, share in many))

    def write(self, hosts: Hosts) -> Path:
        """A file of these hosts."""
        path = self.folder / "hosts.toml"
        path.write_text(hosts.text())
        return path

    @property
    def network(self) -> str:
        """The name of the namespace from which the machines are reached."""
        assert self.placed.network is not None
        return self.placed.network.name

    def agents(self) -> list[int]:
        """Processes of agents, and of what they started."""
        ours = {str(each.network) for each in self.placed.hosts}
        # Not the sshd sessions: behind a link that was down, they take until TCP sends again.
        return [pid for name in ours for pid in _inside(name) if b"offbeat" in command_of(pid)]


def command_of(process: int) -> bytes:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _inside(network: str) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", Path(network).name], capture_output=True, text=True, check=False, timeout=10
    )
    return [int(word) for word in listed.stdout.split()]


@contextmanager
def ssh_machines(folder: Path, count: int = 2, rate: str | None = None) -> Generator[SshMachines]:
    """Machines for the duration of a test."""
    for name in ("user", "host"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port 2222\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\nPidFile none\n"
        "UsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
    )
    with placed(Hosts.alike(count, rate)) as there, ExitStack() as held:
        machines = SshMachines(there, folder)
        known = (folder / "host.pub").read_text().split()[:2]
        lines = [f"[{each.address}]:2222 {' '.join(known)}\n" for each in there.hosts]
        (folder / "known_hosts").write_text("".join(lines))
        for each in there.hosts:
            name = Path(str(each.network)).name
            command = ["ip", "netns", "exec", name, "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")]
            output = held.enter_context((folder / f"sshd-{each.host.name}.log").open("wb"))
            daemon = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ})
            machines.daemons[each.host.name] = daemon
            held.callback(daemon.wait, 10)
            held.callback(daemon.kill)
        for each in there.hosts:
            log = folder / f"sshd-{each.host.name}.log"
            wait_until(lambda log=log: b"listening" in log.read_bytes(), "sshd", 20)
        yield machines

"""A Slurm cluster of two nodes on this machine: munge, a controller and two node daemons, all of the test's own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conftest import wait_until
from offbeat.runtime.launch import free_port

NODES = ("n1", "n2")


COMMANDS = ("slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol", "munged")
"""What must be installed."""


def _conf(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    nodes = "".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2\n" for name in NODES
    )
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=2
UnkillableStepTimeout=20
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """The cluster, while it runs."""

    def __init__(self, folder: Path, held: ExitStack) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._held = held

    def daemon(self, *command: str) -> subprocess.Popen[bytes]:
        """A process of the cluster, which ends with it."""
        output = self._held.enter_context((self.folder / f"{Path(command[0]).name}-{len(command)}.out").open("ab"))
        process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output, cwd=self.folder)
        self._held.callback(process.wait, 20)
        self._held.callback(process.terminate)
        return process

    def ask(self, *command: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"

    def idle(self) -> int:
        """The number of idle nodes."""
        return self.ask("sinfo", "--noheader", "--Node", "--format=%t").split().count("idle")


@contextmanager
def slurm_cluster(folder: Path) -> Generator[SlurmCluster]:
    """Two nodes for the duration of a test."""
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(_conf(folder))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    with ExitStack() as held:
        cluster = SlurmCluster(folder, held)
        cluster.daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log",
        )  # fmt: skip
        wait_until((folder / "munge.socket").exists, "munge's socket", 20)
        cluster.daemon("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in NODES:
            (folder / f"spool-{name}").mkdir()
            cluster.daemon("slurmd", "-D", "-N", name, "-f", str(folder / "slurm.conf"))
        wait_until(lambda: cluster.idle() == len(NODES), "both nodes of Slurm to be idle", 60)
        yield cluster

"""Supervises the data servers of a run from the launcher: their processes, failures and replacements."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from offbeat.errors import RunError
from offbeat.protocols.data_servers.messages import data_server_name
from offbeat.protocols.disturbances import DATA_SERVER
from offbeat.run.job import Job, plain_target
from offbeat.runtime.hosts import Placed
from offbeat.runtime.launch import Role, RoleOutcome, obituary
from offbeat.runtime.run.folder import RunFolder

if TYPE_CHECKING:
    from offbeat.runtime.data_servers.plan import DataServerPlan

SPARES = 16
"""How often a data server is replaced; if it dies more often, something is fundamentally wrong."""
FIRST_PORT = 24_000
"""First port of data servers on hosts of our own, above those of servers and workers."""


class DataServing:
    """The data servers of one run; most runs have none."""

    def __init__(self, job: Job, plan: DataServerPlan | None = None, placed: Placed | None = None) -> None:
        self.plan, self._placed = plan, placed
        self._working = job.workers
        self._deaths: Counter[str] = Counter()
        self.died: list[str] = []
        self.joined: list[str] = []
        """Data servers that took the place of dead ones, in order."""
        self.accounts: dict[str, dict[str, Any]] = {}
        """What each has done, by name."""

    def roles(self, job: Job, folder: RunFolder) -> list[Role]:
        """A process for each data server."""
        plan = self.plan
        if plan is None:
            return []
        config = {
            "plan": plan.plain(),
            "disturb": list(job.goal.disturb),
            "seed": job.goal.seed,
            "goal": job.goal.plain(),
            **plain_target(job.what),
        }
        homes = [None] * plan.count if self._placed is None else _homes(self._placed, plan.count)
        return [
            Role(
                kind=DATA_SERVER,
                rank=number,
                entry="offbeat.worker.data_server:hand_out",
                config={**config, "number": number},
                environment={},
                log=folder.log("data-server", number),
                threads=1,
                serves=True,
                expendable=True,
                network=None if home is None or self._placed is None else self._placed.hosts[home].network,
                machine="" if home is None or self._placed is None else self._placed.hosts[home].machine,
                name=name,
            )
            for number, (name, home) in enumerate(zip(plan.names, homes, strict=True))
        ]

    def ended(self, outcome: RoleOutcome, fired: Sequence[int], lost: Container[str] = ()) -> Role | None:
        """A process of the run has ended: the data server that takes the place of a dead one, if that was one.

        Nothing is started on machines that are lost: there the other data servers take over.
        """
        role = outcome.role
        if role.kind == "worker":
            self._working -= 1
        if role.kind != DATA_SERVER or not self._working or not role.tolerates(outcome.exit_code) or outcome.error:
            return None
        name = str(role)
        self.died.append(name)
        self._deaths[name] = SPARES + 1 if role.machine in lost else self._deaths[name] + 1
        if self._deaths[name] > SPARES:
            if self.plan is not None and all(self._deaths[each] > SPARES for each in self.plan.names):
                raise RunError(
                    f"no data server is left: each has died {SPARES + 1} times, or its machine is lost. The last: "
                    f"{obituary(outcome)}"
                )
            return None
        self.joined.append(name)
        return dataclasses.replace(role, config={**role.config, "disturbed": list(fired)})

    def worker_joins(self) -> None:
        """A new worker takes the place of a dead one."""
        self._working += 1

    def account(self, figures: dict[str, Any]) -> None:
        """A data server has ended with these figures; those of its former processes are lost with them."""
        self.accounts[figures["name"]] = figures

    @property
    def summary(self) -> list[dict[str, Any]]:
        """The figures of all data servers."""
        return [self.accounts[name] for name in sorted(self.accounts)]


def _homes(placed: Placed, count: int) -> list[int]:
    return list(placed.wanted.of_servers(count))


@contextmanager
def data_serving(job: Job, placed: Placed | None = None) -> Generator[DataServing]:
    """The data servers of a job, if it asks for any, with their addresses while the run lasts."""
    count = job.goal.data_servers
    if not count:
        yield DataServing(job)
        return
    from offbeat.runtime.data_servers.plan import DataServerPlan
    from offbeat.runtime.messages import Keys, private_directory

    with private_directory() as sockets:
        addresses: dict[str, str] = {}
        pair = None
        if placed is not None:
            for number, home in enumerate(_homes(placed, count)):
                host = placed.hosts[home]
                # Of a machine's free ports the last, since parameter servers take the first.
                port = host.free_ports[-1 - number] if number < len(host.free_ports) // 2 else FIRST_PORT + number
                addresses[data_server_name(number)] = f"tcp://{host.address}:{port}"
            keys = Keys.generate()
            pair = keys.public, keys.secret
        yield DataServing(job, DataServerPlan(count=count, folder=str(sockets), addresses=addresses, pair=pair), placed)

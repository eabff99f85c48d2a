"""The processes of Sandblaster: a copy of a shard, and of the coordinator, which has no vector."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.protocols import disturbances
from offbeat.protocols.machine import Machine, Name
from offbeat.protocols.sandblaster.lbfgs import Lbfgs
from offbeat.protocols.sandblaster.minimizer import Minimizer
from offbeat.protocols.sandblaster.replica import VectorShard
from offbeat.protocols.servers.messages import COORDINATOR
from offbeat.protocols.servers.replica.fencing import Fence
from offbeat.runtime.disturb import Disturber
from offbeat.runtime.launch import Control
from offbeat.runtime.messages import Endpoint, drive
from offbeat.runtime.sandblaster.plan import CountingCodec, SandblasterPlan
from offbeat.runtime.sandblaster.registers import Registers
from offbeat.runtime.servers.plan import Lines
from offbeat.runtime.system.malloc import keep_freed_memory


def hold(config: Mapping[str, Any], control: Control) -> None:
    """The entry function of a shard's process; the launcher ends it."""
    keep_freed_memory()
    plan, shard = SandblasterPlan.from_plain(config["plan"]), int(config["shard"])
    servers = plan.servers
    machine = VectorShard(shard, servers.view, int(config["replica"]), timing=servers.timing)
    registers = Registers()

    def searched() -> int | None:
        return machine.shard.searched

    faults = _Faults(config, control, "server", shard, machine.fence, searched)
    with Endpoint(machine.name, CountingCodec(), bind=servers.address(machine.name), keys=servers.keys) as endpoint:
        lines = Lines(servers, endpoint)

        def after(event: object, effects: object) -> None:
            del event, effects
            lines.reach(machine.fence.view.replicas(shard))
            faults.look()

        lines.reach([COORDINATOR])
        _serve(machine, machine.fence, endpoint, registers.do, after)


def minimize(config: Mapping[str, Any], control: Control) -> None:
    """The entry function of the coordinator's process; the launcher ends it."""
    plan, codec = SandblasterPlan.from_plain(config["plan"]), CountingCodec()
    servers, optimizer = plan.servers, Lbfgs(plan.history, plan.tolerance)
    machine = Minimizer(optimizer, plan.portions, servers.view, int(config["replica"]), timing=servers.timing)
    faults = _Faults(config, control, "coordinator", 0, machine.fence, lambda: machine.searched)
    with Endpoint(machine.name, codec, bind=servers.address(machine.name), keys=servers.keys) as endpoint:
        lines = Lines(servers, endpoint)

        def after(event: object, effects: object) -> None:
            del event, effects
            machine.account.traffic = (codec.sent, codec.received)
            lines.reach(name for name in machine.fence.view.servers if name not in _copies(machine))
            faults.look()

        lines.reach([COORDINATOR])
        _serve(machine, machine.fence, endpoint, _no_work, after)


def _copies(machine: Minimizer) -> tuple[Name, ...]:
    """All coordinators: they have nothing to say to each other."""
    return machine.fence.view.replicas(len(machine.fence.view.primaries) - 1)


def _serve(machine: Machine, fence: Fence, endpoint: Endpoint[Any], work: Any, after: Any) -> None:
    drive(machine, endpoint, work, until=lambda: fence.retired, after=after)
    print(
        f"{machine.name} gave no sign of life for too long and was declared dead (epoch {fence.view.epoch} was its "
        f"last): it serves nothing any more.",
        file=sys.stderr,
        flush=True,
    )


class _Faults:
    """Injects faults into the process that serves; its step, for `--disturb`, is the iteration of its line search."""

    def __init__(
        self,
        config: Mapping[str, Any],
        control: Control,
        role: str,
        rank: int,
        fence: Fence,
        searched: Callable[[], int | None],
    ) -> None:
        self._faults = [disturbances.parse(sentence) for sentence in config["disturb"]]
        self._role, self._rank, self._seed, self._tell = role, rank, int(config["seed"]), control.send
        self._fence, self._searched = fence, searched
        self._disturber = self._make(None) if fence.serving else None

    def _make(self, after: int | None) -> Disturber:
        return Disturber(self._faults, self._role, self._rank, self._seed, self._tell, after=after)

    def look(self) -> None:
        """After each event: inject what is due."""
        step = self._searched()
        if step is None or not self._fence.serving:
            return
        # Faults up to here have hit the previous primary, and may be why this one serves.
        self._disturber = self._disturber or self._make(step)
        self._disturber.step(step)


def _no_work(work: Any, token: Any) -> None:
    """The coordinator computes nothing outside its machine."""
    del work, token

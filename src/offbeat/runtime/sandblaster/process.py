"""The processes of Sandblaster: a shard, and the coordinator, which has no vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.protocols.sandblaster.lbfgs import Lbfgs
from offbeat.protocols.sandblaster.messages import MINIMIZER, shard_name
from offbeat.protocols.sandblaster.minimizer import Minimizer
from offbeat.protocols.sandblaster.shard import VectorShard
from offbeat.runtime.launch import Control
from offbeat.runtime.messages import Endpoint, drive
from offbeat.runtime.sandblaster.plan import CountingCodec, SandblasterPlan
from offbeat.runtime.sandblaster.registers import Registers
from offbeat.runtime.system.malloc import keep_freed_memory


def hold(config: Mapping[str, Any], control: Control) -> None:
    """The entry function of a shard's process; the launcher ends it."""
    del control
    keep_freed_memory()
    plan, machine = SandblasterPlan.from_plain(config["plan"]), VectorShard(int(config["shard"]))
    registers = Registers()
    with Endpoint(machine.name, CountingCodec(), bind=plan.address(machine.name)) as endpoint:
        drive(machine, endpoint, registers.do, until=lambda: False)


def minimize(config: Mapping[str, Any], control: Control) -> None:
    """The entry function of the coordinator's process; the launcher ends it."""
    del control
    plan, codec = SandblasterPlan.from_plain(config["plan"]), CountingCodec()
    machine = Minimizer(Lbfgs(plan.history, plan.tolerance), plan.shards, plan.portions)

    def count(event: object, effects: object) -> None:
        del event, effects
        machine.traffic = (codec.sent, codec.received)

    with Endpoint(MINIMIZER, codec, bind=plan.address(MINIMIZER)) as endpoint:
        for name in map(shard_name, range(plan.shards)):
            endpoint.connect(name, plan.address(name))
        drive(machine, endpoint, _no_work, until=lambda: False, after=count)


def _no_work(work: Any, token: Any) -> None:
    """The coordinator computes nothing outside its machine."""
    del work, token

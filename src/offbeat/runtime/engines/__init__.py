"""Engines: what finds machines and starts an agent on each, one small file per engine. See docs/engines.md."""

from offbeat.runtime.engines.engine import MachineEngine, engine_for, machines_of
from offbeat.runtime.engines.placement import hosts_on

__all__ = ["MachineEngine", "engine_for", "hosts_on", "machines_of"]

"""Engines: what finds machines and starts an agent on each, one small file per engine. See docs/engines.md."""

from offbeat.runtime.engines.engine import Engine, engine_for, machines_of

__all__ = ["Engine", "engine_for", "machines_of"]

"""Faults on real processes, as asked for by `--disturb`: see `offbeat.protocols.disturbances` for the sentences."""

from offbeat.runtime.disturb._disturber import Disturber

__all__ = ["Disturber"]

"""Fault injection into real processes for `--disturb`; `offbeat.protocols.disturbances` has the syntax."""

from offbeat.runtime.disturb._disturber import Disturber

__all__ = ["Disturber"]

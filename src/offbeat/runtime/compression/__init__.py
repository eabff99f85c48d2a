"""Compressors: what is left of a row of numbers on its way, one file each."""

from __future__ import annotations

from offbeat.runtime.compression.account import Account, together
from offbeat.runtime.compression.build import build
from offbeat.runtime.compression.coder import Coder, Feedback, Link, Plain
from offbeat.runtime.compression.link import GroupLink

__all__ = ["Account", "Coder", "Feedback", "GroupLink", "Link", "Plain", "build", "together"]

"""Compressors: what is left of a row of numbers on its way, one file each."""

from __future__ import annotations

from offbeat.runtime.compression.account import CompressionAccount, together
from offbeat.runtime.compression.build import build
from offbeat.runtime.compression.coder import Coder, Feedback, PayloadExchange, PlainCoder
from offbeat.runtime.compression.link import GroupLink

__all__ = ["Coder", "CompressionAccount", "Feedback", "GroupLink", "PayloadExchange", "PlainCoder", "build", "together"]

"""Compressors: what is left of a row of numbers on its way, one file each."""

from __future__ import annotations

from offbeat.runtime.compression.coder import Coder, Feedback, Link

__all__ = ["Coder", "Feedback", "Link"]

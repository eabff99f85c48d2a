"""Folders of the project, for tests wherever they lie."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
MNIST = ROOT.parent / "shared" / "data" / "mnist"

"""Folders of the project, for tests wherever they lie."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
IMPORTED = (SUPPORT, SUPPORT.parent)
"""Folders whose modules tests import: those of `pythonpath` in pyproject.toml."""
MNIST = ROOT.parent / "shared" / "data" / "mnist"

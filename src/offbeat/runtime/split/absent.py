"""Parameters whose values are on other workers only: here they keep their shapes, and have no memory."""

from __future__ import annotations

from torch import Tensor

_ABSENT = "_offbeat_absent"


def mark_absent(parameter: Tensor, absent: bool) -> None:
    """Note whether a parameter's values are on other workers only."""
    setattr(parameter, _ABSENT, absent)


def is_absent(parameter: Tensor) -> bool:
    """Whether a parameter's values are on other workers only."""
    return getattr(parameter, _ABSENT, False)

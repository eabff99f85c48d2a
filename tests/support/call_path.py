"""Which functions of offbeat are on the call stack at named moments."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import offbeat

SOURCE = str(Path(offbeat.__file__).parent)


class Walk:
    """Functions on the stack whenever one of some functions is called, in the threads that it is installed in."""

    def __init__(self, moments: set[str]) -> None:
        self.moments = moments
        self.passed: set[str] = set()
        self.hops: dict[CodeType, None] = {}
        self.begun = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.begun or event != "call":
            return
        moment = self.moments & {frame.f_code.co_qualname, frame.f_code.co_name}
        if not moment or self.moments == self.passed:
            return
        self.passed |= moment
        walked: list[CodeType] = []
        at: FrameType | None = frame
        while at is not None and at.f_code.co_qualname != "serve":
            if at.f_code.co_filename.startswith(SOURCE) and "<" not in at.f_code.co_name:
                walked.append(at.f_code)
            at = at.f_back
        self.hops |= dict.fromkeys(reversed(walked))

    def names(self) -> list[str]:
        return [f"{code.co_filename.removeprefix(SOURCE)}: {code.co_qualname}" for code in self.hops]

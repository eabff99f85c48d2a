"""Recursion without Python's stack: generators that yield the calls they make, so that depth costs memory only."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

Result = TypeVar("Result")
Call = Generator[Any, Any, Result]
"""A recursive function: it yields calls of its own kind, is sent their results, and returns its result."""


def run(call: Call[Result]) -> Result:
    """Run a call and all calls that it yields; returns its result."""
    stack: list[Call[Any]] = [call]
    sent: Any = None
    while True:
        try:
            stack.append(stack[-1].send(sent))
            sent = None
        except StopIteration as end:
            stack.pop()
            sent = end.value
            if not stack:
                return sent

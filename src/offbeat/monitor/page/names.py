"""What spans are called on the page: each operation, and each channel on which calls are counted, has a number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from msgspec import Struct

from offbeat.monitor.judging import SEND, members_of
from offbeat.monitor.verdicts import worker_name
from offbeat.runtime.stamps import About

_OWN: Final = frozenset({"servers"})
"""Groups on which each process counts its calls for itself: a worker's pull is no other worker's."""


class Label(Struct, frozen=True, array_like=True):
    """What something is called, without the number of the call: that stands between the two parts."""

    what: str
    """`all_reduce`, `send to worker 1` …"""
    more: str = ""
    """`(sum of float32 x 4) of group world, called at train.py:88`."""

    def said(self, sequence: int) -> str:
        """In words, of one call."""
        return f"{self.what} #{sequence} {self.more}".rstrip()


class Names:
    """The operations and channels of one run, over all its processes."""

    def __init__(self) -> None:
        self._labels: dict[Label, int] = {Label("something"): 0}
        self._channels: dict[Hashable, int] = {}
        self.labels: list[Label] = [Label("something")]
        """By number."""
        self.members: list[tuple[str, ...]] = []
        """Who takes part in the calls on each channel; nobody if that is not known."""

    def label(self, about: About | None) -> int:
        """The number of what a record is about."""
        found = _label(about)
        if found not in self._labels:
            self._labels[found] = len(self.labels)
            self.labels.append(found)
        return self._labels[found]

    def channel(self, lane: str, about: About | None) -> int:
        """The number of the channel: the same for all members of a group, and for both ends of a line of messages."""
        if about is None or about.group in _OWN:
            key, members = (lane, about and (about.group, about.operation)), ()
        elif about.peer is None:
            key, members = (about.group,), tuple(map(worker_name, members_of(about)))
        elif about.peer < 0:
            key, members = (about.group, lane, about.operation, about.tag), ()
        else:
            members = (lane, worker_name(about.peer))
            key = (about.group, *(members if about.operation == SEND else members[::-1]), about.tag)
        if key not in self._channels:
            self._channels[key] = len(self.members)
            self.members.append(members)
        return self._channels[key]


def _label(about: About | None) -> Label:
    if about is None:
        return Label("something")
    what = about.operation
    if about.peer is not None:
        what += f" {worker_name(about.peer) if about.peer >= 0 else 'anybody'}"
    size = " x ".join(part for part in (about.dtype, _count(about.elements)) if part)
    details = " of ".join(part for part in (about.reduce, size) if part)
    root = "" if about.root is None else f"root {worker_name(about.root)}"
    inside = ", ".join(part for part in (details, root, f"tag {about.tag}" if about.tag else "") if part)
    where = f", called at {about.caller}" if about.caller else ""
    return Label(what, f"{f'({inside}) ' if inside else ''}of group {about.group}{where}")


def _count(elements: int | None) -> str:
    return "" if elements is None else f"{elements:,}"

"""Labels and channels of calls as numbers: what a call is called, and on what its sequence is counted."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

from msgspec import Struct

from offbeat.monitor.calls import SEND, call_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.histories import Call
from offbeat.runtime.events.recorder import About
from offbeat.runtime.events.servers import GROUP as SERVERS

_SPREADING: Final = ("broadcast", "scatter")


class Label(Struct, frozen=True, array_like=True):
    """What a call is called, without its number: that stands between the two parts."""

    what: str
    """`all_reduce`, `send to worker 1` …"""
    more: str = ""
    """`(sum of float32 x 4) of group world, called at train.py:88`."""

    def said(self, sequence: int) -> str:
        """One call in words."""
        return f"{self.what} #{sequence} {self.more}" if self.more else self.what


UNKNOWN: Final = Label("something")


class CallChannel(NamedTuple):
    """Where calls are counted."""

    members: tuple[str, ...] = ()
    """Who takes part in each call; empty if that is not known."""
    collective: bool = False


class Root(NamedTuple):
    """Whom the members of a call wait for."""

    name: str | None = None
    """The member who gives or gets all; None: everybody waits for everybody."""
    gives: bool = False
    """Whether the others wait for the root, instead of the root for the others."""


class Names:
    """The labels and channels of one run, over all its processes."""

    def __init__(self) -> None:
        self._labels: dict[tuple[Label, Root], int] = {}
        self._channels: dict[Hashable, int] = {}
        self.labels: list[Label] = []
        """By number."""
        self.roots: list[Root] = []
        """Of each label."""
        self.channels: list[CallChannel] = []
        """By number."""
        self.label(UNKNOWN)

    def label(self, label: Label, root: Root = Root()) -> int:  # noqa: B008 (immutable)
        """The number of a label."""
        if (label, root) not in self._labels:
            self._labels[label, root] = len(self.labels)
            self.labels.append(label)
            self.roots.append(root)
        return self._labels[label, root]

    def channel(self, key: Hashable, channel: CallChannel) -> int:
        """The number of a channel, which is known by its key."""
        if key not in self._channels:
            self._channels[key] = len(self.channels)
            self.channels.append(channel)
        return self._channels[key]

    def of_call(self, call: Call) -> tuple[int, int]:
        """Channel and label of a collective."""
        return self.channel((call.group,), CallChannel(call.members, True)), self._of(call)

    def of_record(self, lane: str, about: About | None) -> tuple[int, int]:
        """Channel and label of a record: all members of a group have the same channel, and both ends of messages."""
        if about is None:
            return self.channel((lane, None), CallChannel()), self.label(UNKNOWN)
        call = call_of(about, 0)
        if about.group == SERVERS:  # A worker's pull is not another worker's: each counts its own.
            return self.channel((lane, about.group, about.operation), CallChannel()), self._of(call)
        if about.peer is None:
            return self.of_call(call)
        peer = worker_name(about.peer) if about.peer >= 0 else "anybody"
        label = self._of(call, f" {peer}", f", tag {about.tag}" if about.tag else "")
        if about.peer < 0:
            return self.channel((about.group, lane, about.operation, about.tag), CallChannel()), label
        ends = (lane, peer) if about.operation == SEND else (peer, lane)
        return self.channel((about.group, *ends, about.tag), CallChannel(ends)), label

    def _of(self, call: Call, peer: str = "", tag: str = "") -> int:
        what, _, more = str(call).partition(f" #{call.sequence} ")
        root = Root() if call.root is None else Root(call.root, call.operation in _SPREADING)
        return self.label(Label(what + peer, more + tag), root)

"""What a transfer costs: links between ranks, and the ports that transfers queue at.

A hop of b bytes takes `alpha + beta * b`. Only `beta * b` of it holds a port: latency overlaps with the next transfer,
so p - 1 messages that leave one rank together take `alpha + (p - 1) * beta * b`. Every rank has a port out and a port
in, each of which carries one byte at a time, both at once (full duplex). With `Ports.HOST` the ranks of a host share
one such pair for what leaves and enters the host: a single network card. A port serves transfers in the order of the
schedule. What is on its way to a busy port waits in the network, and leaves its sender's port free for the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from offbeat.errors import UsageError
from offbeat.simulate.units import parse_duration, parse_rate

EXAMPLE = "10Gbit,50us (rate, then latency); 10Gbit,50us,8GB/s also says how fast numbers are added up"


class Ports(StrEnum):
    """Whether each rank or each host has a network port."""

    RANK = "rank"
    HOST = "host"


@dataclass(frozen=True)
class Link:
    """What it costs to bring bytes from one rank to another, and to do something with them there."""

    alpha: float  # Seconds until the first byte arrives.
    beta: float  # Seconds per byte on the way.
    gamma: float = 0.0  # Seconds per byte that is combined with what is there.
    copy: float = 0.0  # Seconds per byte that is copied: published, or put in its place when it was not received there.

    def __post_init__(self) -> None:
        """Refuse negative values and NaN."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise UsageError(f"a link's {field.name} is {value}; it must be a number of seconds, 0 or more.")

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from `RATE,LATENCY[,RATE OF REDUCING[,RATE OF COPYING]]`, such as `10Gbit,50us`."""
        parts = text.split(",")
        if not 2 <= len(parts) <= 4:
            raise UsageError(f"{text!r} is not a network: it is written like {EXAMPLE}.")
        rate, latency, *rest = parts
        return cls(parse_duration(latency), 1 / parse_rate(rate), *(1 / parse_rate(part) for part in rest))


SHARED_MEMORY = Link(1e-6, 1 / 12.5e9)  # Default for ranks on one host: 100 Gbit/s, 1 us.


@dataclass(frozen=True)
class Network:
    """The links of a view: one kind inside hosts, one between them."""

    between: Link  # Between ranks of different hosts.
    inside: Link = SHARED_MEMORY  # Between ranks of one host.
    ports: Ports = Ports.RANK  # Whether every rank has its own network card, or every host has one.

    @classmethod
    def parse(cls, between: str, inside: str | None = None, ports: Ports = Ports.RANK) -> Network:
        """A network from text such as `10Gbit,50us`, and another such text for what is inside hosts."""
        return cls(Link.parse(between), SHARED_MEMORY if inside is None else Link.parse(inside), ports)

    @classmethod
    def uniform(cls, link: Link) -> Network:
        """The same link between any two ranks."""
        return cls(link, link)

"""Logical clocks: numbers that follow cause and effect where the clocks on the wall do not.

- *Lamport*: every event is max(own, received) + 1. If e happened before e', L(e) < L(e'); not the other way round.
- *Vector*: entry i counts the events of process i that are known of, this one included. e happened before e' if and
  only if V(e) < V(e'), where V < V' means V_i <= V'_i for all i, and V != V'.

Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System" (1978); Mattern, "Virtual Time and Global
States of Distributed Systems" (1989).
"""

from __future__ import annotations

Vector = tuple[int, ...]
"""For each process, how many of its events are known of."""


def lamport(own: int, *received: int) -> int:
    """The Lamport clock of the next event of a process, given those of the messages that it has received in it."""
    return max(own, *received) + 1 if received else own + 1


def tick(own: Vector, process: int, *received: Vector) -> Vector:
    """The vector clock of the next event of a process, given those of the messages that it has received in it."""
    known = [max(entries) for entries in zip(own, *received, strict=True)]
    known[process] += 1
    return tuple(known)

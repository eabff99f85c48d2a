"""A computation as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from offbeat.protocols.causality.histories import Computation


def json_lines(computation: Computation) -> Iterator[str]:
    """Each event as a line of JSON, causes before effects: what it was, its clocks and its direct causes."""
    for place in computation.order:
        known = msgspec.to_builtins(computation.event(place), enc_hook=str)
        entries = {
            "process": computation.processes[place.process],
            "number": place.number,
            **{key: value for key, value in known.items() if value not in (None, "", [], {})},
            "lamport": int(computation.lamports[place.process][place.number]),
            "vector": computation.vector(place),
            "causes": [[computation.processes[i], number] for i, number in computation.causes(place)],
        }
        yield msgspec.json.encode(entries).decode()

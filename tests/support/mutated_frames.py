"""Mutated frames sent to a real endpoint."""

from __future__ import annotations

import os
import random
from pathlib import Path

from frame_support import mutated, originals
from message_support import PRIVATE, Endpoints, Stranger, received, refuses
from message_support import endpoints as endpoints
from message_support import nothing_is_left as nothing_is_left


def mutations(count: int) -> list[list[bytes]]:
    chance, valid = random.Random(count), originals()
    made = [mutated(chance.choice(valid), valid, chance) or [b""] for _ in range(count)]
    return [frames for frames in made if frames not in valid]


def mutated_at_the_door(endpoints: Endpoints, count: int) -> None:
    """Send so many mutated messages to an endpoint: it refuses all, in constant memory, and hears who speaks right."""
    server, batch, pool = endpoints("server 0.0", bind=PRIVATE), 500, mutations(min(count, 50_000))
    memory: list[int] = []
    with Stranger(server.address, b"mutant") as stranger:
        for sent in range(0, count, batch):
            for number in range(sent, sent + batch):
                stranger.says(*pool[number % len(pool)])
            assert refuses(server, sent + batch)
            memory.append(resident_bytes())
        assert (tuple(server.known.by_name), server.traffic) == ((), {})
        assert max(memory) - memory[len(memory) // 4] < 4 * 1024 * 1024
        stranger.says(*originals()[0])
        assert received(server).sender == "mutant"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

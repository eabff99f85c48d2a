"""Entries run as the workers of several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offbeat.runtime.hosts import Placed
from offbeat.runtime.launch import EVERYWHERE, Launcher, Role, serve_store, worker_environment


def started(launcher: Launcher, placed: Placed, folder: Path, entry: str, **config: Any) -> list[dict[str, Any]]:
    """Run an entry as the workers of the hosts; what each has said, by rank."""
    heard: dict[int, dict[str, Any]] = {}
    with placed.inside():
        store = serve_store(host=EVERYWHERE)
    seats = [placed.seat(rank) for rank in range(placed.wanted.workers)]
    roles = [
        Role(
            "worker", rank, f"host_entries:{entry}", config,
            worker_environment(rank, len(seats), store.port, placed.address, seat),
            folder / f"{rank}.log", 1, network=seat.host.network,
        )
        for rank, seat in enumerate(seats)
    ]  # fmt: skip
    launcher.run(roles, on_message=lambda role, message: heard.update({role.rank: message}))
    return [heard[rank] for rank in sorted(heard)]

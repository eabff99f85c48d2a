"""Whether a run waits for its input, and what data servers or data in memory would bring, from what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from offbeat.limits import DATA_SERVERS

NOTICED: Final = 0.1
"""Share of the time at which input is worth a word."""
ENOUGH: Final = 1.0
"""Seconds of training below which nothing is concluded."""
WORTHWHILE: Final = 1.1
"""How many times as fast a run must become for a way to be proposed."""
_COPIES: Final = 2  # Of each batch from a data server: into shared memory, and out of it.


def input_advice(data: Mapping[str, Any], config: Mapping[str, Any], cores: int, memory: int | None) -> list[str]:
    """Sentences about the input of a finished run; none where input is small.

    Args:
        data: The result so far.
        config: The run's configuration.
        cores: Processors that this machine has for the run.
        memory: Free bytes of this machine; None: unknown.

    """
    figures = data.get("input") or {}
    seconds, kinds = float(data.get("seconds", 0.0)), data.get("seconds_by_kind", {})
    waiting = float(kinds.get("input", 0.0))
    samples, workers = int(data.get("samples", 0)), int(data["workers"])
    if not figures or not samples or seconds < ENOUGH or waiting < NOTICED * seconds:
        return []
    share = f"the run waited for input in {waiting / seconds:.0%} of its time"
    servers = int(config["goal"].get("data_servers") or 0)
    if servers:
        return [_more_servers(share, data, servers, seconds - waiting)]
    each = waiting * workers / samples
    words = [f"{share}: reading and decoding an example took {_short(each)}"]
    others = [
        _servers_in_words(figures, each * samples, seconds - waiting, seconds, samples, workers, config, cores),
        _memory_in_words(figures, data, waiting, seconds, workers, memory),
    ]
    return words + [text for text in others if text]


def _servers_in_words(
    figures: Mapping[str, Any],
    work: float,
    rest: float,
    seconds: float,
    samples: int,
    workers: int,
    config: Mapping[str, Any],
    cores: int,
) -> str:
    wanted = min(max(1, math.ceil(work / max(rest, 1e-9))), DATA_SERVERS, 2 * cores)
    busy = float(figures["processor_share"])
    spare = cores - workers * int(config.get("threads") or 1)
    if busy > 0.5 and spare < 1:
        return (
            f"data servers would not help on this machine: that work needs a processor ({busy:.0%} of the time), and "
            f"the workers use all {cores}; they would help on another host, or with fewer threads for each worker"
        )
    count = min(wanted, spare) if busy > 0.5 else wanted
    copied = _COPIES * samples * float(figures["bytes_per_example"]) / float(figures["copied_bytes_per_second"])
    then = max(rest + copied / workers, work / count)
    if seconds / then < WORTHWHILE:
        return "data servers would not make it faster"
    return f"with --data-servers {count} it would be about {seconds / then:.1f} times as fast"


def _memory_in_words(
    figures: Mapping[str, Any], data: Mapping[str, Any], waiting: float, seconds: float, workers: int, free: int | None
) -> str:
    examples, size = figures.get("examples"), int(figures["bytes_per_example"])
    passes = int(data.get("epochs") or 0)
    if not examples or not size or passes < 2:
        return ""  # A stream, or a single pass: nothing would be read twice.
    total = int(examples) * size
    if free is not None and total > free // 2:
        return f"decoded, the examples take {total / 1e9:,.1f} GB, too much to keep in memory here"
    copied = total * passes / float(figures["copied_bytes_per_second"]) / workers
    then = seconds - waiting + waiting / passes + copied
    if seconds / then < WORTHWHILE:
        return ""
    return (
        f"decoded once and kept in memory ({total / 1e6:,.1f} MB), as a TensorDataset, about {seconds / then:.1f} "
        f"times over {passes} passes"
    )


def _more_servers(share: str, data: Mapping[str, Any], servers: int, rest: float) -> str:
    work = sum(float(each["seconds"]) for each in data.get("data_servers", []))
    wanted = min(math.ceil(work / max(rest, 1e-9)), DATA_SERVERS)
    if wanted <= servers:
        return (
            f"{share}, although data servers prepared all of it in {work / servers:.2g} s: batches are late at the "
            f"start of a pass, while a data server is replaced, and when all cores are in use"
        )
    return f"{share}: {servers} data servers prepare too little; --data-servers {wanted} would keep up, given the cores"


def _short(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"

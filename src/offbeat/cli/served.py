"""What servers and their clients have to say at the end of a run, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from offbeat.cli.ages import ages_in_words
from offbeat.cli.display import pushes_in_words, staleness_in_words
from offbeat.fitting import Result
from offbeat.protocols.servers.messages import worker_name

MOST_LINKS = 4
"""Links that are told of by themselves, the busiest ones."""


def served_in_words(result: Result) -> Iterator[tuple[str, str]]:
    """Names and texts of lines: pushes, refusals, how old reads were, who has waited, and what went over each link."""
    pushes: Counter[str] = Counter()
    for shard in result.servers:
        pushes.update(shard["pushes"])
    stale = staleness_in_words(result.staleness)
    yield "servers", f"pushes {pushes_in_words(pushes)}{f'; {stale}' if stale else ''}"
    if result.refusals:
        more = pushes["refused"] - 1
        yield "refused", result.refusals[0] + (f"; {more:,} more (refusals in run.json)" if more > 0 else "")
    if stale:
        yield "reads by age", ages_in_words({int(age): count for age, count in result.staleness.items()})
    if result.workers > 1:
        yield "waited", waits_in_words(result)
    yield "links", links_in_words(result)


def waits_in_words(result: Result) -> str:
    """`worker 0 1.2 s, worker 2 0.3 s`: of those who were there at the end."""
    gone = Counter(name for name in result.died if name not in result.joined)
    names = [name for name in map(worker_name, range(result.workers)) if name not in gone]
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in zip(names, result.waits, strict=False))


def links_in_words(result: Result) -> str:
    """`worker 0 to server 1.0 27.8 kB, back 32.5 kB`, as the servers have counted; the busiest, and how many more."""
    found = [
        (peer, shard["served_by"], traffic["received"], traffic["sent"])
        for shard in result.servers
        for peer, traffic in shard["links"].items()
        if traffic["received"] + traffic["sent"]
    ]
    found.sort(key=lambda link: -(link[2] + link[3]))
    said = [f"{peer} to {server} {amount(to)}, back {amount(back)}" for peer, server, to, back in found[:MOST_LINKS]]
    more = len(found) - MOST_LINKS
    return "; ".join([*said, f"{more} more in run.json"] if more > 0 else said)


def amount(count: int) -> str:
    """Bytes in a unit that fits."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"

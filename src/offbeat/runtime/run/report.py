"""A result in words: the report printed by `offbeat run`, and by scripts that run without it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offbeat.protocols.servers.messages import worker_name
from offbeat.runtime.run.folder import strategy_in_words
from offbeat.runtime.run.result import Result
from offbeat.runtime.run.stages_in_words import slowest_in_words, stage_lines

SILENT = "OFFBEAT_REPORT"  # Set to 0, this variable keeps scripts outside `offbeat run` from printing a report.
MOST_LINKS = 4  # Busiest links shown.
MOST_AGES = 8  # Ages of reads counted separately.


def reporter(folder: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """A listener that prints a team's result on stderr, for teams without a launcher of ours."""

    def hear(message: Mapping[str, Any]) -> None:
        if message.get("kind") != "result" or os.environ.get(SILENT) == "0":
            return
        result = Result.from_plain({"task": sys.argv[0], "run": folder or "", **message})
        mark, rest = headline(result)
        with suppress(OSError, ValueError):  # stderr may be closed.
            print("\n".join([f"\noffbeat: {mark}{rest}", *report_lines(result)]), file=sys.stderr, flush=True)

    return hear


def headline(result: Result) -> tuple[str, str]:
    """The result in a line: the words to highlight, and the rest."""
    who = f"{result.workers} worker{'s' if result.workers > 1 else ''}, {strategy_in_words(result.strategy)}"
    score = "no score reported" if result.score is None else f"score {result.score:.4g}"
    target = (result.target or "").removeprefix("score=")
    if result.reached_target:
        return "Target reached", f": {score} (wanted {target}) after {result.seconds_to_target:.2f} s. {who}."
    if result.reached_target is False:
        best = "" if result.best_score is None else f", best {result.best_score:.4g}"
        return "Target missed", f": {score}{best} (wanted {target}) after {result.seconds:.2f} s. {who}."
    return "Done", f": {score} after {result.seconds:.2f} s. {who}."


def report_lines(result: Result) -> list[str]:
    """The labelled lines under the headline."""
    return [f"  {name:<19} {text}" for name, text in _entries(result)]


def _entries(result: Result) -> Iterator[tuple[str, str]]:
    if result.test_score is not None:
        yield "on test data", f"{result.test_score:.4g} (scored once, at the end)"
    epochs = "" if result.epochs is None else f", {result.epochs} epochs"
    examples = f", {result.samples:,} examples" if result.samples else ""
    yield "work done", f"{result.steps:,} steps{epochs}{examples}"
    speed = f"{result.samples_per_second:,.0f} examples/s; " if result.samples else ""
    yield "speed", f"{speed}{result.core_seconds:.1f} core-seconds"
    mean = f" (mean of {result.workers} workers)" if result.workers > 1 else ""
    yield "where the time went", kinds_in_words(result.seconds_by_kind) + mean
    if result.federated:
        yield from federated_in_words(result.federated)
    elif result.sandblaster:
        yield from sandblaster_in_words(result)
    elif result.workers > 1:
        yield "sent", f"{amount(result.bytes_sent)} between {result.workers} workers"
    if result.servers:
        yield from served_in_words(result)
    if result.data_servers:
        yield "data servers", data_servers_in_words(result)
    if result.skipped:
        yield "skipped", f"{result.skipped:,} examples of a stream that came faster than they were used"
    for words in result.input.get("advice", [])[:1]:
        yield "input", "; ".join([words, *result.input["advice"][1:]])
    if result.hosts:
        yield "hosts", _hosts_in_words(result.hosts)
    if result.predicted:
        yield "predicted", result.predicted["words"]
    if result.pays:
        yield "compression", result.pays["words"]
    if result.split:
        yield from stage_lines(result.split)
        yield "cut", slowest_in_words(result.split)
    if result.gossip:
        yield "gossip", gossip_in_words(result.gossip)
    if result.died:
        yield "died on the way", ", ".join(result.died)
    if result.joined:
        yield "joined on the way", ", ".join(result.joined)
    if result.disturbances.get("asked"):
        yield "disturbances", f"{result.disturbances['fired']:,} fired, {result.disturbances['asked']:,} asked for"
    if result.startup_seconds:
        yield "start-up", f"{result.startup_seconds:.1f} s, not counted above"
    if result.run != Path():
        yield "everything is in", str(result.run)


def data_servers_in_words(result: Result) -> str:
    """How much data servers have prepared, and how fast."""
    each = result.data_servers
    batches, examples = sum(one["batches"] for one in each), sum(one["examples"] for one in each)
    seconds, sent = sum(one["seconds"] for one in each), sum(one["bytes_sent"] for one in each)
    rate = f", {examples / seconds:,.0f} examples/s each" if seconds > 0 else ""
    return f"{len(each)}, prepared {batches:,} batches of {examples:,} examples ({amount(sent)}){rate}"


def federated_in_words(counts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What clients and server would have sent, and which updates counted."""
    up, down = amount(counts["bytes_up"]), amount(counts["bytes_down"])
    yield "clients would send", f"{up} to the server and receive {down}; workers simulate them"
    failed = f"; without an update: {counts['failed_rounds']:,}" if counts["failed_rounds"] else ""
    yield (
        "clients' updates",
        f"{updates_in_words(counts)} in {counts['rounds']:,} rounds of {counts['clients']:,} clients{failed}",
    )
    if privacy := counts.get("privacy"):
        spent = f"epsilon {counts['epsilon']:.3g} at delta {privacy['delta']:g} spent in {privacy['rounds']:,} rounds"
        yield "privacy", f"{spent}; noise {privacy['noise']:g} times the clipping bound of {privacy['clip']:g}"
    if counts.get("stopped"):
        yield "stopped early", counts["stopped"]
    if counts.get("personal"):
        yield "personal models", personal_in_words(counts["personal"])


def updates_in_words(counts: Mapping[str, int]) -> str:
    """`120 counted, 3 late`: what became of the updates of a federated run; empty if there is none."""
    lost = [f"{counts[name]:,} {name}" for name in ("late", "dropped", "refused") if counts.get(name)]
    return ", ".join([f"{counts['updates']:,} counted", *lost]) if counts else ""


def personal_in_words(personal: Mapping[str, Any]) -> str:
    """`finetune: mean 0.87 to 0.97, …, on what each of 18 clients held out`: the global model, and clients' own."""
    if not personal["clients"]:
        return f"{personal['method']}: no client has a model of its own and examples to score it on"
    names = {"mean": "mean", "worst_tenth": "worst tenth", "deviation": "deviation"}
    before, after = personal["before"], personal["after"]
    changes = ", ".join(f"{words} {before[name]:.4g} to {after[name]:.4g}" for name, words in names.items())
    counts = f"{personal['better']:,} of {personal['clients']:,} clients are better off, {personal['worse']:,} worse"
    more = f"; {personal['without']:,} never took part" if personal["without"] else ""
    return f"{personal['method']}: {changes} on each client's held-out examples; {counts}{more}"


def _hosts_in_words(hosts: Sequence[Mapping[str, Any]]) -> str:
    """`a (10.77.0.2, 100Mbit): workers 0 1, server 0.0`."""
    entries: list[str] = []
    for host in hosts:
        rate = f", {host['rate']}" if host["rate"] else ""
        numbers = {what: " ".join(map(str, host[f"{what}s"])) for what in ("worker", "server")}
        here = [f"{what}{'s' if ' ' in ids else ''} {ids}" for what, ids in numbers.items() if ids]
        entries.append(f"{host['name']} ({host['address']}{rate}): {', '.join(here) or 'nobody'}")
    return "; ".join(entries)


# -- where time went, staleness, gossip ------------------------------------------------------------------------------


def kinds_in_words(seconds: Mapping[str, float]) -> str:
    """`compute 61 %, communicate 20 %, …`, largest first."""
    return ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in shares(seconds))


def shares(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Share of each kind of time, largest first, omitting those that round to nothing."""
    total = sum(seconds.values()) or 1.0
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return [(kind, spent / total) for kind, spent in ranked if spent / total >= 0.005]


def staleness_in_words(counts: Mapping[str, int]) -> str:
    """`reads 0.8 steps old (most 3)`; nothing if all were fresh."""
    total = sum(counts.values())
    mean = sum(int(steps) * count for steps, count in counts.items()) / total if total else 0.0
    return f"reads {mean:.2g} steps old (most {max(map(int, counts))})" if mean else ""


def gossip_in_words(gossip: Mapping[str, Any]) -> str:
    """Convergence of the replicas: predicted by the graph, and measured."""
    text = f"spectral gap {gossip['spectral_gap']:.3g}: a step leaves at most {gossip['rate']:.3g} of the distance"
    if gossip.get("measured_rate") is not None:
        text += f"; measured {gossip['measured_rate']:.3g}, expected of random ones {gossip['usual_rate']:.3g}"
    return text


def pushes_in_words(counts: Mapping[str, int], trouble_only: bool = False) -> str:
    """`229 applied, 1 late`, largest first."""
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {what}" for what, count in ranked if not (trouble_only and what == "applied"))


def ages_in_words(counts: Mapping[int, int]) -> str:
    """`0: 53, 1: 135, 2: 12`: reads by age in steps; the oldest together."""
    ages = [age for age in sorted(counts) if counts[age]]
    entries = [f"{age}: {counts[age]:,}" for age in ages[:MOST_AGES]]
    older = sum(counts[age] for age in ages[MOST_AGES:])
    return ", ".join([*entries, f"older: {older:,}"] if older else entries)


# -- servers ---------------------------------------------------------------------------------------------------------


def sandblaster_in_words(result: Result) -> Iterator[tuple[str, str]]:
    """What the coordinator did, who computed how much, and what went to shards."""
    figures = result.sandblaster
    stopped = f"; stopped because {figures['stopped']}" if figures["stopped"] else ""
    yield "iterations", f"{figures['iterations']:,}, with {figures['evaluations']:,} evaluations{stopped}"
    shares = ", ".join(f"{count:,} by {name}" for name, count in sorted(figures["portions"].items()))
    twice = sum(figures["duplicated"].values())
    again = f"; {twice:,} of them while another still had them" if twice else ""
    yield "portions", f"{shares}{again}"
    coordinator = sum(figures["coordinator_bytes"].values())
    yield "sent", f"{amount(result.bytes_sent)} by workers to shards; {amount(coordinator)} to and from the coordinator"


def served_in_words(result: Result) -> Iterator[tuple[str, str]]:
    """Labelled lines: pushes, refusals, staleness of reads, waits, and bytes per link."""
    pushes: Counter[str] = Counter()
    for shard in result.servers:
        pushes.update(shard["pushes"])
    stale = staleness_in_words(result.staleness)
    yield "servers", f"pushes {pushes_in_words(pushes)}{f'; {stale}' if stale else ''}"
    if result.update:
        yield "update", f"{result.update['program']} (in place of the optimizer's step)"
    if result.refusals:
        more = pushes["refused"] - 1
        yield "refused", result.refusals[0] + (f"; {more:,} more (refusals in run.json)" if more > 0 else "")
    if stale:
        yield "reads by age", ages_in_words({int(age): count for age, count in result.staleness.items()})
    if result.workers > 1:
        yield "waited", waits_in_words(result)
    yield "links", links_in_words(result)


def waits_in_words(result: Result) -> str:
    """`worker 0 1.2 s, worker 2 0.3 s`: workers present at the end."""
    gone = Counter(name for name in result.died if name not in result.joined)
    names = [name for name in map(worker_name, range(result.workers)) if name not in gone]
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in zip(names, result.waits, strict=False))


def links_in_words(result: Result) -> str:
    """`worker 0 to server 1.0 27.8 kB, back 32.5 kB`, as counted by the servers; the busiest, and how many more."""
    links = [
        (peer, shard["served_by"], traffic["received"], traffic["sent"])
        for shard in result.servers
        for peer, traffic in shard["links"].items()
        if traffic["received"] + traffic["sent"]
    ]
    links.sort(key=lambda link: -(link[2] + link[3]))
    entries = [f"{peer} to {server} {amount(to)}, back {amount(back)}" for peer, server, to, back in links[:MOST_LINKS]]
    more = len(links) - MOST_LINKS
    return "; ".join([*entries, f"{more} more in run.json"] if more > 0 else entries)


def amount(count: int) -> str:
    """Bytes in a readable unit."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"

"""`offbeat bench`: collectives in virtual time or on real processes, and servers in virtual time, as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from offbeat.cli.ages import ages_in_words
from offbeat.errors import UsageError, did_you_mean
from offbeat.protocols.collectives import ALGORITHMS, Collective
from offbeat.simulate.league import Comparison, Crossover, compare_collectives
from offbeat.simulate.network import EXAMPLE, Link, Network, Ports
from offbeat.simulate.servers import Paced, Shards, parse_rule, simulate
from offbeat.simulate.stragglers import Stragglers
from offbeat.simulate.units import parse_duration, parse_size, seconds_in_words, size_in_words

SIMULATED_SIZE = "100MB"
MEASURED_SIZES = ("4kB", "32kB", "256kB", "1MB", "4MB", "25MiB")
BLOCKS = 15


@dataclass(frozen=True)
class _Options:
    """Options that belong to one way of answering."""

    def refuse(self, why: str) -> None:
        """Raise if one of them was given."""
        for field in fields(self):
            if getattr(self, field.name) is not None:
                raise UsageError(f"--{field.name.replace('_', '-')} {why}.")


@dataclass(frozen=True)
class Simulated(_Options):
    """What is asked about a network that need not exist; None where nothing was said."""

    network: str | None
    inside: str | None
    hosts: int | None
    per_host: int | None
    ports: str | None
    collective: str | None


@dataclass(frozen=True)
class Measured(_Options):
    """What is asked about real processes; None where nothing was said."""

    peers: str | None
    blocks: int | None
    out: Path | None
    picture: Path | None


def simulated(ranks: int, size: str | None, sizes: str | None, asked: Simulated, as_json: bool) -> None:
    """Print how long each algorithm would take, and where the best one changes."""
    if ranks < 1:
        raise UsageError(f"--ranks {ranks} makes no sense: give at least 1.")
    if asked.network is None:
        raise UsageError(f"--simulate needs --network, written like {EXAMPLE}.")
    network = Network.parse(asked.network, asked.inside, _chosen(asked.ports, Ports.RANK, "--ports"))
    collective = _chosen(asked.collective, Collective.ALL_REDUCE, "--collective")
    hosts = _hosts(ranks, asked.hosts, asked.per_host)
    steps = _sizes(size, sizes, _ladder(parse_size(size or SIMULATED_SIZE)))
    with Console(stderr=True).status("simulating") as status:
        count = len(ALGORITHMS[collective])
        compared = compare_collectives(
            ranks, steps, network, hosts, collective, lambda name: status.update(f"simulating {name}, of {count}")
        )
    if as_json:
        links = {"between": asdict(network.between), "inside": asdict(network.inside), "ports": network.ports.value}
        print(json.dumps({"simulated": True, "network": links} | compared.plain()))
    else:
        _print(Console(file=sys.stdout, highlight=False, soft_wrap=True), compared, asked)


def measured(ranks: int, size: str | None, sizes: str | None, asked: Measured, as_json: bool) -> None:
    """Print how long all-reduce takes on real processes, here and through peers."""
    from offbeat import benching

    blocks = BLOCKS if asked.blocks is None else asked.blocks
    peers = benching.PEERS if asked.peers is None else [name.strip() for name in asked.peers.split(",")]
    largest = parse_size(size) if size else max(map(parse_size, MEASURED_SIZES))
    steps = _sizes(size, sizes, [*(step for step in map(parse_size, MEASURED_SIZES) if step < largest), largest])
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    result = benching.collectives(
        ranks, steps, peers, blocks, asked.out, asked.picture, lambda text: console.print(text, style="dim")
    )
    if as_json:
        print(json.dumps(result))
    else:
        Console(file=sys.stdout, highlight=False).print(benching.table(result))


Choice = TypeVar("Choice", Ports, Collective)


def _chosen(text: str | None, default: Choice, option: str) -> Choice:
    if text is None:
        return default
    kind = type(default)
    names = [one.value for one in kind]
    if text.replace("-", "_") not in names:
        raise UsageError(f"{option} {text!r} is unknown.{did_you_mean(text, names)}")
    return kind(text.replace("-", "_"))


def _hosts(ranks: int, hosts: int | None, per_host: int | None) -> list[int] | None:
    """Each rank's host: neighbours share one."""
    if hosts is not None and per_host is not None:
        raise UsageError("--hosts and --per-host say the same in two ways: give one of them.")
    if hosts is not None:
        if not 1 <= hosts <= ranks:
            raise UsageError(f"--hosts {hosts} makes no sense for {ranks} ranks: give 1 to {ranks}.")
        return [rank * hosts // ranks for rank in range(ranks)]
    if per_host is not None:
        if per_host < 1:
            raise UsageError(f"--per-host {per_host} makes no sense: give at least 1.")
        return [rank // per_host for rank in range(ranks)]
    return None


def _sizes(size: str | None, sizes: str | None, ladder: list[int]) -> list[int]:
    if sizes is None:
        return ladder
    if size is not None:
        raise UsageError("--size makes a ladder up to it, --sizes gives every one: use one of them.")
    return sorted({parse_size(text) for text in sizes.split(",")})


def _ladder(largest: int) -> list[int]:
    """Powers of ten from a kilobyte up to a size."""
    return [step for step in (10**power for power in range(3, 19)) if step < largest] + [largest]


def _print(console: Console, compared: Comparison, asked: Simulated) -> None:
    where = f"{compared.ranks:,} ranks on {compared.hosts:,} host{'s' if compared.hosts > 1 else ''}"
    console.print(f"[bold]{compared.collective.value}[/bold], {where}, {escape(str(asked.network))}: simulated time")
    table = _table(compared)
    # Too many sizes for the terminal: let it wrap the lines, rather than cut the figures.
    width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table, width=width, crop=False)
    console.print("Fastest: " + _in_words(compared.best(0), compared.crossovers))
    for line in _left_out(compared.left_out):
        console.print(line, style="dim", markup=False)


def _table(compared: Comparison) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("algorithm", no_wrap=True)
    for size in compared.sizes:
        table.add_column(size_in_words(size) + " ", justify="right", no_wrap=True)
    best = [compared.best(column) for column in range(len(compared.sizes))]
    for name, times in compared.seconds.items():
        cells = [
            f"[bold green]{seconds_in_words(time)}*[/bold green]" if winner == name else f"{seconds_in_words(time)} "
            for time, winner in zip(times, best, strict=True)
        ]
        table.add_row(name, *cells)
    return table


def _in_words(first: str, crossovers: Sequence[Crossover]) -> str:
    words = f"[bold]{first}[/bold]"
    if not crossovers:
        return f"{words} at all these sizes (marked *)."
    for crossover in crossovers:
        words += f" below {size_in_words(crossover.size)}, [bold]{crossover.after}[/bold]"
    return f"{words} from there on (marked *)."


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    """One line per reason, with all that it rules out."""
    by_reason = sorted(reasons.items(), key=lambda item: item[1])
    return [
        f"Left out: {', '.join(name for name, _ in group)}. Why: {reason}"
        for reason, group in groupby(by_reason, key=lambda item: item[1])
    ]


@dataclass(frozen=True)
class Training:
    """What is asked about training with servers in virtual time; None where nothing was said."""

    workers: int
    steps: int
    step: str
    stragglers: str
    size: str | None
    servers: int | None
    network: str | None
    seed: int

    def shards(self) -> Shards | None:
        """What is exchanged, and through what; None if exchanges take no time."""
        if self.network is None and self.size is None and self.servers is None:
            return None
        if self.network is None:
            raise UsageError(f"--size and --servers need --network, written like {EXAMPLE}.")
        if self.size is None:
            raise UsageError("--network needs --size, what is pushed and pulled in each step, such as 100MB.")
        return Shards(1 if self.servers is None else self.servers, parse_size(self.size), Link.parse(self.network))


def simulated_servers(asked: Training, rules: Sequence[str], as_json: bool) -> None:
    """Print what a step takes under each rule, who waits, and how stale what is read is."""
    stragglers = Stragglers.parse(asked.stragglers, parse_duration(asked.step))
    shards = asked.shards()
    chosen = {str(rule): rule for rule in map(parse_rule, rules)}
    if asked.seed < 0:
        raise UsageError(f"--seed {asked.seed} makes no sense: give 0 or more.")
    console = Console(stderr=True)
    found: dict[str, Paced] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, rule in chosen.items():
            bar = progress.add_task(name, total=1.0)
            found[name] = simulate(
                rule,
                asked.workers,
                asked.steps,
                stragglers,
                shards,
                asked.seed,
                progress=lambda share, bar=bar: progress.update(bar, completed=share),
            )
            progress.update(bar, completed=1.0)
    bsp = found.get("bsp")
    over_bsp = {name: bsp.seconds_per_step / one.seconds_per_step for name, one in found.items()} if bsp else {}
    if as_json:
        results = [one.plain() | {"speedup_over_bsp": over_bsp.get(name)} for name, one in found.items()]
        print(json.dumps({"simulated": True} | asdict(asked) | {"rules": results}))
    else:
        _print_servers(Console(file=sys.stdout, highlight=False, soft_wrap=True), asked, found, over_bsp)


def _print_servers(
    console: Console, asked: Training, found: Mapping[str, Paced], over_bsp: Mapping[str, float]
) -> None:
    through = "exchanges take no time"
    if asked.network is not None:
        through = f"{asked.size} through {asked.servers or 1} x {asked.network}"
    console.print(
        f"[bold]servers[/bold], {asked.workers:,} workers, {asked.steps:,} steps of {escape(asked.step)}, "
        f"stragglers: {escape(asked.stragglers)}, {escape(through)}: simulated time"
    )
    console.print(_servers_table(found, over_bsp), crop=False)
    console.print(
        "Over bsp: how many times as fast. Staleness: steps that a worker was ahead of the slowest when it read.",
        style="dim",
    )
    for name, one in found.items():
        ages = {age: int(count) for age, count in enumerate(one.staleness)}
        if len(ages) > 1:
            console.print(f"{name}: reads by staleness {ages_in_words(ages)}.", style="dim", markup=False)
    late = {name: one.late for name, one in found.items() if one.late}
    for name, count in late.items():
        console.print(f"{name}: {count:,} gradients came too late and were discarded.", style="dim", markup=False)


def _servers_table(found: Mapping[str, Paced], over_bsp: Mapping[str, float]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("rule", no_wrap=True)
    for name in ("time per step", "over bsp", "idle", "exchange", "staleness", "99 %", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in found.items():
        table.add_row(
            name,
            seconds_in_words(one.seconds_per_step),
            f"{over_bsp[name]:.2f}x" if name in over_bsp else "",
            f"{100 * one.idle_share:.1f} %",
            f"{100 * one.exchange_share:.1f} %",
            f"{one.staleness_mean:.2f}",
            f"{one.staleness_quantile(0.99):,}",
            f"{len(one.staleness) - 1:,}",
        )
    return table

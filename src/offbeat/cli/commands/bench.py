"""`offbeat bench`: collectives in virtual time or on real processes, and servers in virtual time, as tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from offbeat import limits
from offbeat.cli.options import CollectivesOptions, OutputFormat, ServerOptions
from offbeat.cli.output import print_json
from offbeat.errors import StrategyError, UsageError, did_you_mean
from offbeat.protocols.collectives import ALGORITHMS, Collective
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf
from offbeat.runtime.run.report import ages_in_words
from offbeat.simulate.algorithm_ranking import Comparison, Crossover, compare_collectives
from offbeat.simulate.network import EXAMPLE, Link, Network, Ports
from offbeat.simulate.servers.stragglers import Stragglers
from offbeat.simulate.servers.training import Paced, ShardTraffic, parse_rule, simulate
from offbeat.simulate.units import parse_duration, parse_size, seconds_in_words, size_in_words

SIMULATED_SIZE = "100MB"
MEASURED_SIZES = ("4kB", "32kB", "256kB", "1MB", "4MB", "25MiB")
BLOCKS = 15
RULES = ("bsp", "ssp(3)", "asp")


def simulated(asked: CollectivesOptions) -> None:
    """Print how long each algorithm would take, and where the best one changes."""
    ranks = asked.ranks
    limits.whole("--ranks", ranks, limits.SIMULATED_RANKS)
    if asked.network is None:
        raise UsageError(f"--simulate needs --network, written like {EXAMPLE}.")
    network = Network.parse(asked.network, asked.inside, _chosen(asked.ports, Ports.RANK, "--ports"))
    collective = _chosen(asked.collective, Collective.ALL_REDUCE, "--collective")
    hosts = _hosts(ranks, asked.hosts, asked.per_host)
    steps = _sizes(asked, _ladder(parse_size(asked.size or SIMULATED_SIZE)))
    with Console(stderr=True).status("simulating") as status:
        count = len(ALGORITHMS[collective])
        compared = compare_collectives(
            ranks, steps, network, hosts, collective, lambda name: status.update(f"simulating {name}, of {count}")
        )
    if asked.output is OutputFormat.json:
        links = {"between": asdict(network.between), "inside": asdict(network.inside), "ports": network.ports.value}
        print_json({"simulated": True, "network": links} | compared.plain())
    else:
        _print(Console(file=sys.stdout, highlight=False, soft_wrap=True), compared, asked)


def measured(asked: CollectivesOptions) -> None:
    """Print how long all-reduce takes on real processes, here and through peers."""
    from offbeat import bench as benching

    blocks = BLOCKS if asked.blocks is None else asked.blocks
    peers = benching.PEERS if asked.peers is None else [name.strip() for name in asked.peers.split(",")]
    largest = parse_size(asked.size) if asked.size else max(map(parse_size, MEASURED_SIZES))
    steps = _sizes(asked, [*(step for step in map(parse_size, MEASURED_SIZES) if step < largest), largest])
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    result = benching.collectives(
        asked.ranks, steps, peers, blocks, asked.out, asked.picture, lambda text: console.print(text, style="dim")
    )
    if asked.output is OutputFormat.json:
        print_json(result)
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
        limits.whole("--per-host", per_host, limits.SIMULATED_RANKS)
        return [rank // per_host for rank in range(ranks)]
    return None


def _sizes(asked: CollectivesOptions, ladder: list[int]) -> list[int]:
    if asked.sizes is None:
        return ladder
    if asked.size is not None:
        raise UsageError("--size makes a ladder up to it, --sizes gives every one: use one of them.")
    return sorted({parse_size(text) for text in asked.sizes.split(",")})


def _ladder(largest: int) -> list[int]:
    """Powers of ten from a kilobyte up to a size."""
    return [step for step in (10**power for power in range(3, 19)) if step < largest] + [largest]


def _print(console: Console, compared: Comparison, asked: CollectivesOptions) -> None:
    where = f"{compared.ranks:,} ranks on {compared.hosts:,} host{'s' if compared.hosts > 1 else ''}"
    console.print(f"[bold]{compared.collective.value}[/bold], {where}, {escape(str(asked.network))}: simulated time")
    _print_whole(console, _table(compared))
    console.print("Fastest: " + _in_words(compared.best(0), compared.crossovers))
    for line in _left_out(compared.left_out):
        console.print(line, style="dim", markup=False)


def _print_whole(console: Console, table: Table) -> None:
    """Print a table that may be too wide for the terminal: lines then wrap, and no figure is cut."""
    width = console.measure(table, options=console.options.update(width=10_000)).maximum
    Console(file=console.file, highlight=False, width=max(console.width, width)).print(table, crop=False)


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


def _shards(asked: ServerOptions) -> ShardTraffic | None:
    """What is exchanged, and through what; None if exchanges take no time."""
    if asked.network is None and asked.size is None and asked.servers is None:
        return None
    if asked.network is None:
        raise UsageError(f"--size and --servers need --network, written like {EXAMPLE}.")
    if asked.size is None:
        raise UsageError("--network needs --size, what is pushed and pulled in each step, such as 100MB.")
    return ShardTraffic(
        1 if asked.servers is None else asked.servers, parse_size(asked.size), Link.parse(asked.network)
    )


@dataclass(frozen=True)
class Played:
    """One way of training with servers, as far as a simulation needs it."""

    rule: Rule
    rhythm: RhythmOf | None = None
    """When workers exchange; None: as `server(consistency=...)` does under the rule."""
    work: int = 1
    """How many times a worker computes its share of a batch."""

    @classmethod
    def of(cls, text: str, workers: int) -> Played:
        """A whole strategy; refused where it has no servers."""
        from offbeat.strategies import Exchanging, combined, parse

        strategy = combined(parse(text))
        strategy.check(workers)
        exchange = strategy.exchange
        assert isinstance(exchange, Exchanging)  # noqa: S101 (what all strategies of that axis are)
        rhythm, needed = exchange.rhythm(), exchange.servers(workers)
        if rhythm is None or needed is None:
            raise StrategyError(
                f"{text} trains without servers, so there is nothing to play here. Give server, downpour, elastic or "
                f"coded; `offbeat bench collectives --simulate` plays all-reduces."
            )
        if len(strategy.parts()) > 1:
            raise StrategyError(f"{text}: only the exchange itself is played. Leave out what is added to {exchange}.")
        return cls(needed[2], rhythm, exchange.work)


def simulated_servers(asked: ServerOptions) -> None:
    """Print what a step takes under each rule and strategy, who waits, and how stale what is read is."""
    base = parse_duration(asked.step)
    shards = _shards(asked)
    rules = asked.rules or (() if asked.strategies else RULES)
    chosen = {str(rule): Played(rule) for rule in map(parse_rule, rules)}
    chosen |= {text: Played.of(text, asked.workers) for text in asked.strategies}
    limits.whole("--seed", asked.seed, 2**63 - 1, least=0)
    console = Console(stderr=True)
    found: dict[str, Paced] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, played in chosen.items():
            bar = progress.add_task(name, total=1.0)
            found[name] = simulate(
                played.rule,
                asked.workers,
                asked.steps,
                Stragglers.parse(asked.stragglers, base * played.work),
                shards,
                asked.seed,
                rhythm=played.rhythm,
                progress=lambda share, bar=bar: progress.update(bar, completed=share),
            )
            progress.update(bar, completed=1.0)
    bsp = found.get("bsp")
    over_bsp = {name: bsp.seconds_per_step / one.seconds_per_step for name, one in found.items()} if bsp else {}
    if asked.output is OutputFormat.json:
        results = [
            {"name": name} | one.plain() | {"speedup_over_bsp": over_bsp.get(name)} for name, one in found.items()
        ]
        names = ("workers", "steps", "step", "stragglers", "size", "servers", "network", "seed")
        print_json({"simulated": True} | {name: getattr(asked, name) for name in names} | {"rules": results})
    else:
        _print_servers(Console(file=sys.stdout, highlight=False, soft_wrap=True), asked, found, over_bsp)


def _print_servers(
    console: Console, asked: ServerOptions, found: Mapping[str, Paced], over_bsp: Mapping[str, float]
) -> None:
    through = "exchanges take no time"
    if asked.network is not None:
        through = f"{asked.size} through {asked.servers or 1} x {asked.network}"
    console.print(
        f"[bold]servers[/bold], {asked.workers:,} workers, {asked.steps:,} steps of {escape(asked.step)}, "
        f"stragglers: {escape(asked.stragglers)}, {escape(through)}: simulated time"
    )
    _print_whole(console, _servers_table(found, over_bsp))
    console.print(
        "Over bsp: how many times as fast. Messages: gradients and values sent per worker and step. Staleness: steps "
        "that a worker was ahead of the slowest in what it computes from.",
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
    for name in ("time per step", "over bsp", "idle", "exchange", "messages", "staleness", "99 %", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in found.items():
        table.add_row(
            name,
            seconds_in_words(one.seconds_per_step),
            f"{over_bsp[name]:.2f}x" if name in over_bsp else "",
            f"{100 * one.idle_share:.1f} %",
            f"{100 * one.exchange_share:.1f} %",
            f"{one.messages_per_step:.2f}",
            f"{one.staleness_mean:.2f}",
            f"{one.staleness_quantile(0.99):,}",
            f"{len(one.staleness) - 1:,}",
        )
    return table

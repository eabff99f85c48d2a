"""`offbeat bench`: collectives in virtual time or on real processes, and servers in virtual time, as tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from offbeat import limits
from offbeat.cli.options import CollectivesOptions, ServerOptions
from offbeat.cli.output import figures, print_json
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
MEASURED_SIZES = [parse_size(text) for text in ("4kB", "32kB", "256kB", "1MB", "4MB", "25MiB")]
BLOCKS = 15
RULES = ("bsp", "ssp(3)", "asp")


def collectives(options: CollectivesOptions) -> None:
    """Print how long collectives take, on real processes or simulated."""
    if options.simulate:
        _simulate_collectives(options)
    else:
        _measure_collectives(options)


def _simulate_collectives(options: CollectivesOptions) -> None:
    """Print how long each algorithm would take, and where the best one changes."""
    ranks = options.ranks
    limits.whole("--ranks", ranks, limits.SIMULATED_RANKS)
    if options.network is None:
        raise UsageError(f"--simulate needs --network, written like {EXAMPLE}.")
    network = Network.parse(options.network, options.inside, _chosen(options.ports, Ports.RANK, "--ports"))
    collective = _chosen(options.collective, Collective.ALL_REDUCE, "--collective")
    hosts = _hosts(ranks, options.host_count, options.per_host)
    sizes = _sizes(options, [10**power for power in range(3, 19)], parse_size(options.size or SIMULATED_SIZE))
    with Console(stderr=True).status("simulating") as status:
        count = len(ALGORITHMS[collective])
        comparison = compare_collectives(
            ranks, sizes, network, hosts, collective, lambda name: status.update(f"simulating {name}, of {count}")
        )
    if options.as_json:
        links = {"between": asdict(network.between), "inside": asdict(network.inside), "ports": network.ports.value}
        print_json({"simulated": True, "network": links} | comparison.plain())
    else:
        _print(Console(file=sys.stdout, highlight=False, soft_wrap=True), comparison, options)


def _measure_collectives(options: CollectivesOptions) -> None:
    """Print how long calls take on real processes, in offbeat and in its peers."""
    from offbeat import bench

    blocks = BLOCKS if options.blocks is None else options.blocks
    peers = bench.PEERS if options.peers is None else [name.strip() for name in options.peers.split(",")]
    largest = parse_size(options.size) if options.size else MEASURED_SIZES[-1]
    sizes = _sizes(options, MEASURED_SIZES, largest)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    results = bench.collectives(
        options.ranks,
        sizes,
        peers,
        blocks,
        options.report,
        options.picture,
        lambda text: console.print(text, style="dim"),
        [name.replace("-", "_") for name in options.call] or ["all_reduce"],
    )
    if options.as_json:
        print_json(results[0] if len(results) == 1 else {"results": results})
        return
    for result in results:
        Console(file=sys.stdout, highlight=False).print(bench.table(result))


Choice = TypeVar("Choice", Ports, Collective)


def _chosen(text: str | None, default: Choice, option: str) -> Choice:
    if text is None:
        return default
    kind = type(default)
    names = [member.value for member in kind]
    if text.replace("-", "_") not in names:
        raise UsageError(f"{option} {text!r} is unknown.{did_you_mean(text, names)}")
    return kind(text.replace("-", "_"))


def _hosts(ranks: int, count: int | None, per_host: int | None) -> list[int] | None:
    """Each rank's host: neighbours share one."""
    if count is not None and per_host is not None:
        raise UsageError("--host-count and --per-host say the same in two ways: give one of them.")
    if count is not None:
        if not 1 <= count <= ranks:
            raise UsageError(f"--host-count {count} makes no sense for {ranks} ranks: give 1 to {ranks}.")
        return [rank * count // ranks for rank in range(ranks)]
    if per_host is not None:
        limits.whole("--per-host", per_host, limits.SIMULATED_RANKS)
        return [rank // per_host for rank in range(ranks)]
    return None


def _sizes(options: CollectivesOptions, ladder: list[int], largest: int) -> list[int]:
    """The requested sizes, or the steps of the ladder up to the largest."""
    if options.sizes is None:
        return [*(size for size in ladder if size < largest), largest]
    if options.size is not None:
        raise UsageError("--size adds smaller sizes, --sizes lists them all: give one of them.")
    return sorted({parse_size(text) for text in options.sizes.split(",")})


def _print(console: Console, comparison: Comparison, options: CollectivesOptions) -> None:
    where = f"{comparison.ranks:,} ranks on {comparison.hosts:,} host{'s' if comparison.hosts > 1 else ''}"
    console.print(
        f"[bold]{comparison.collective.value}[/bold], {where}, {escape(str(options.network))}: simulated time"
    )
    _print_whole(console, _table(comparison))
    console.print("Fastest: " + _in_words(comparison.best(0), comparison.crossovers))
    reasons = sorted(comparison.left_out.items(), key=itemgetter(1))
    for reason, names in groupby(reasons, key=itemgetter(1)):
        omitted = ", ".join(name for name, _ in names)
        console.print(f"Omitted: {omitted}. Why: {reason}", style="dim", markup=False)


def _print_whole(console: Console, table: Table) -> None:
    """Print a table that may be too wide for the terminal: lines then wrap, and no figure is cut."""
    width = console.measure(table, options=console.options.update(width=10_000)).maximum
    Console(file=console.file, highlight=False, width=max(console.width, width)).print(table, crop=False)


def _table(comparison: Comparison) -> Table:
    table = figures(("algorithm", *(f"{size_in_words(size)} " for size in comparison.sizes)), gap=1)
    best = [comparison.best(column) for column in range(len(comparison.sizes))]
    for name, times in comparison.seconds.items():
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


def _shards(options: ServerOptions) -> ShardTraffic | None:
    """Sizes and links of the exchanges; None if they take no time."""
    if options.network is None and options.size is None and options.servers is None:
        return None
    if options.network is None:
        raise UsageError(f"--size and --servers need --network, written like {EXAMPLE}.")
    if options.size is None:
        raise UsageError("--network needs --size, the bytes pushed and pulled per step, such as 100MB.")
    return ShardTraffic(
        1 if options.servers is None else options.servers, parse_size(options.size), Link.parse(options.network)
    )


@dataclass(frozen=True)
class Played:
    """One way of training with servers, as a simulation needs it."""

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
                f"{text} trains without servers, so there is nothing to simulate here. Give server, downpour, elastic "
                f"or coded; `offbeat bench collectives --simulate` is for all-reduces."
            )
        if len(strategy.parts()) > 1:
            raise StrategyError(f"{text}: only the exchange itself is simulated. Omit what is added to {exchange}.")
        return cls(needed[2], rhythm, exchange.work)


def server(options: ServerOptions) -> None:
    """Print step time, waiting and staleness under each consistency rule and strategy."""
    base = parse_duration(options.step)
    shards = _shards(options)
    rules = options.rules or (() if options.strategies else RULES)
    chosen = {str(rule): Played(rule) for rule in map(parse_rule, rules)}
    chosen |= {text: Played.of(text, options.workers) for text in options.strategies}
    limits.whole("--seed", options.seed, 2**63 - 1, least=0)
    console = Console(stderr=True)
    runs: dict[str, Paced] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, played in chosen.items():
            bar = progress.add_task(name, total=1.0)
            runs[name] = simulate(
                played.rule,
                options.workers,
                options.steps,
                Stragglers.parse(options.stragglers, base * played.work),
                shards,
                options.seed,
                rhythm=played.rhythm,
                progress=lambda share, bar=bar: progress.update(bar, completed=share),
            )
            progress.update(bar, completed=1.0)
    bsp = runs.get("bsp")
    over_bsp = {name: bsp.seconds_per_step / run.seconds_per_step for name, run in runs.items()} if bsp else {}
    if options.as_json:
        results = [
            {"name": name} | run.plain() | {"speedup_over_bsp": over_bsp.get(name)} for name, run in runs.items()
        ]
        names = ("workers", "steps", "step", "stragglers", "size", "servers", "network", "seed")
        print_json({"simulated": True} | {name: getattr(options, name) for name in names} | {"rules": results})
    else:
        _print_servers(Console(file=sys.stdout, highlight=False, soft_wrap=True), options, runs, over_bsp)


def _print_servers(
    console: Console, options: ServerOptions, runs: Mapping[str, Paced], over_bsp: Mapping[str, float]
) -> None:
    through = "exchanges take no time"
    if options.network is not None:
        through = f"{options.size} through {options.servers or 1} x {options.network}"
    console.print(
        f"[bold]servers[/bold], {options.workers:,} workers, {options.steps:,} steps of {escape(options.step)}, "
        f"stragglers: {escape(options.stragglers)}, {escape(through)}: simulated time"
    )
    _print_whole(console, _servers_table(runs, over_bsp))
    console.print(
        "Over bsp: how many times as fast. Messages: gradients and values sent per worker and step. Staleness: steps "
        "that a worker was ahead of the slowest in what it computes from.",
        style="dim",
    )
    for name, run in runs.items():
        ages = {age: int(count) for age, count in enumerate(run.staleness)}
        if len(ages) > 1:
            console.print(f"{name}: reads by staleness {ages_in_words(ages)}.", style="dim", markup=False)
    late = {name: run.late for name, run in runs.items() if run.late}
    for name, count in late.items():
        console.print(f"{name}: {count:,} gradients came too late and were discarded.", style="dim", markup=False)


def _servers_table(runs: Mapping[str, Paced], over_bsp: Mapping[str, float]) -> Table:
    columns = ("time per step", "over bsp", "idle", "exchange", "messages", "staleness", "99 %", "most")
    table = figures(("rule", *columns), gap=1)
    for name, run in runs.items():
        table.add_row(
            name,
            seconds_in_words(run.seconds_per_step),
            f"{over_bsp[name]:.2f}x" if name in over_bsp else "",
            f"{100 * run.idle_share:.1f} %",
            f"{100 * run.exchange_share:.1f} %",
            f"{run.messages_per_step:.2f}",
            f"{run.staleness_mean:.2f}",
            f"{run.staleness_quantile(0.99):,}",
            f"{len(run.staleness) - 1:,}",
        )
    return table

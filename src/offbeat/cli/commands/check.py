"""`offbeat check`: the contract suite on one strategy, schedule or set of machines."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from offbeat import limits
from offbeat.cli.options import CheckOptions, refuse
from offbeat.cli.output import figures, print_json
from offbeat.errors import MachineError, ScheduleError
from offbeat.run.drive import WARM
from offbeat.run.job import agreed_workers
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.simulate.machine_contract import MachineContract
from offbeat.strategies import Combined, combined, parse
from offbeat.testing import Check, ScheduleReport, bench, check_machine, check_schedule, checks_for
from offbeat.user_protocols import OwnSchedule, find_own

SHOWN = (2, 4, 7, 8, 32, 33)
"""Numbers of ranks whose cost is printed: powers of two, and others."""
RUNS = 200
"""Default number of fault-injection seeds for machines."""


def check_any(options: CheckOptions) -> None:
    """Check the subject; the exit code is 1 if a promise does not hold."""
    own = find_own(options.subject, options.collective)
    console = Console(stderr=options.as_json, highlight=False, soft_wrap=True)
    if isinstance(own, OwnSchedule):
        refuse(
            options,
            ("workers", "hosts", "runs", "seed"),
            "does not apply to a schedule, which is proved for 1 to 33 ranks: omit it",
        )
        _check_own_schedule(own, options, console)
    elif isinstance(own, MachineContract):
        refuse(
            options,
            ("workers", "hosts", "collective"),
            "does not apply to machines, whose contract says how many there are: omit it",
        )
        _check_own_machines(own, console, options)
    else:
        refuse(options, ("collective", "runs", "seed"), "does not apply to a strategy: omit it")
        _check_strategy(options, console)


def _check_own_schedule(own: OwnSchedule, options: CheckOptions, console: Console) -> None:
    text = options.subject
    console.print(f"[bold]{escape(text)}[/bold] as {own.collective.value}: every contribution exactly once")
    start = time.monotonic()
    subject = {"schedule": text, "collective": own.collective.value}
    try:
        with Launcher(WARM) as launcher:
            report = check_schedule(own, launcher=launcher, say=lambda words: console.print(f"  {words} …"))
    except ScheduleError as error:
        _fail(console, options, subject, error)
    if options.as_json:
        print_json({**subject, "holds": True, **_plain(report)})
        return
    _print_costs(console, report)
    ran = f"ran on {', '.join(map(str, report.real))} processes" if report.real else f"not run: {report.unrun}"
    console.print(
        f"  [green]holds[/green]  proved for 1 to 33 ranks, {report.simulated} simulations in virtual time, "
        f"{escape(ran)} ({time.monotonic() - start:.1f} s)"
    )


def _print_costs(console: Console, report: ScheduleReport) -> None:
    columns = ("ranks", "rounds", "hops", "fewest*", "busiest port", "least", "times the least")
    table = figures(columns, names=0)
    for size in SHOWN:
        cost, least = report.sizes[size], report.bounds[size]
        layout = report.layout(size)
        whole = layout.count * layout.itemsize
        ratio = f"{cost.port_bytes / least.port_bytes:.2f}" if least.port_bytes else ""
        shares = (f"{cost.port_bytes / whole:.2f} n", f"{least.port_bytes / whole:.2f} n")
        table.add_row(str(size), str(cost.rounds), str(cost.hops), str(least.hops), *shares, ratio)
    console.print(table)
    console.print("n: bytes of the buffer. *: if a port carries one message at a time.", style="dim")


def _plain(report: ScheduleReport) -> dict[str, Any]:
    ranks: dict[int, dict[str, Any]] = {}
    for size, cost in report.sizes.items():
        least = report.bounds[size]
        ranks[size] = {"rounds": cost.rounds, "hops": cost.hops, "least_hops": least.hops}
        ranks[size] |= {"port_bytes": cost.port_bytes, "least_port_bytes": least.port_bytes}
    real = list(report.real)
    return {"ranks": ranks, "simulated": report.simulated, "real": real, "not_run": report.unrun or None}


def _check_own_machines(contract: MachineContract, console: Console, options: CheckOptions) -> None:
    text = options.subject
    runs = RUNS if options.runs is None else options.runs
    limits.whole("--runs", runs, 1_000_000)
    if options.seed is not None:
        limits.whole("--seed", options.seed, 2**63 - 1, least=0)
    times = f"{runs} runs" if options.seed is None else f"seed {options.seed}"
    console.print(f"[bold]{escape(text)}[/bold] under random faults, {times}: {', '.join(contract.survives)}")
    errors = Console(stderr=True)
    try:
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
            bar = progress.add_task("runs", total=1.0)
            report = check_machine(
                contract, runs, options.seed, name=text, progress=lambda share: progress.update(bar, completed=share)
            )
    except MachineError as error:
        _fail(console, options, {"machines": text}, error, seed=error.seed)
    if options.as_json:
        print_json({"machines": text, "holds": True, **msgspec.structs.asdict(report)})
        return
    faults = ", ".join(f"{kind} in {count}" for kind, count in sorted(report.faults.items())) or "no faults"
    counts = f"{report.runs:,} runs, {report.events:,} events, {report.lost:,} messages lost"
    console.print(f"  [green]holds[/green]  {counts}; {faults}")


def _fail(console: Console, options: CheckOptions, subject: dict[str, Any], error: Exception, **more: Any) -> NoReturn:
    console.print("  [red]FAILS[/red]")
    console.print(str(error), markup=False)
    if options.as_json:
        print_json({**subject, "holds": False, **more, "wrong": str(error)})
    raise typer.Exit(1) from error


def _check_strategy(options: CheckOptions, console: Console) -> None:
    """Run every check that the strategy's traits demand."""
    strategy = combined(parse(options.subject))
    hosts = None if options.hosts is None else Hosts.read(options.hosts)
    workers = agreed_workers(hosts, options.workers, 2)
    limits.whole("--workers", workers, limits.WORKERS, why="each is a process")
    strategy.check(workers)
    console.print(
        f"[bold]{escape(str(strategy))}[/bold] on {workers} workers: what its traits promise, on real processes"
    )
    outcomes: dict[str, str | None] = {}
    with Launcher(WARM) as launcher:
        for check in checks_for(strategy):
            start = time.monotonic()
            outcomes[check.name] = failure = _failure(check, strategy, workers, launcher, hosts)
            mark = "[green]holds[/green]" if failure is None else "[red]FAILS[/red]"
            console.print(f"  {mark}  {check.name} ({time.monotonic() - start:.1f} s)")
            if failure is not None:
                console.print(f"         {failure}", markup=False)
    failed = [name for name, failure in outcomes.items() if failure is not None]
    if options.as_json:
        print_json({"strategy": str(strategy), "workers": workers, "failed": failed, "checks": outcomes})
    else:
        console.print(f"{len(outcomes) - len(failed)} of {len(outcomes)} hold.")
    if failed:
        raise typer.Exit(1)


def _failure(check: Check, strategy: Combined, workers: int, launcher: Launcher, hosts: Hosts | None) -> str | None:
    try:
        with bench(strategy, workers, launcher, hosts) as place:
            check.run(place)
    except Exception as error:
        return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return None

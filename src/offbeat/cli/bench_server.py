"""`offbeat bench server`: its options. What it prints is in `bench`, which is imported when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from offbeat.errors import UsageError

EPILOG = (
    'Examples: offbeat bench server --simulate --workers 100 --stragglers "transient(0.2, 0.15)" [dim]|[/dim] '
    'offbeat bench server --simulate --workers 64 --stragglers "permanent(4)" --rule bsp --rule "drop_slowest(1)" '
    "[dim]|[/dim] offbeat bench server --simulate --workers 64 --size 100MB --servers 8 --network 10Gbit,50us "
    '[dim]|[/dim] offbeat bench server --simulate --workers 8 --strategy "downpour(push=4, fetch=4)" '
    "--strategy elastic"
)
RULES = ("bsp", "ssp(3)", "asp")


def server(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="In virtual time, on machines that need not exist.")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", "-w", help="How many workers train.")] = 100,
    steps: Annotated[int, typer.Option(help="Steps that each of them makes.")] = 1000,
    step: Annotated[str, typer.Option(help="What an undisturbed step takes to compute.")] = "40ms",
    stragglers: Annotated[
        str,
        typer.Option(
            help="What makes steps longer: [bold]transient(0.2, 0.15)[/bold] pauses a step 0.2 s with probability "
            "0.15, [bold]permanent(4)[/bold] makes one worker 4 times slower ([bold]permanent(4, 3)[/bold] makes "
            "three), [bold]pareto(0.01, 1.5)[/bold] (scale, shape) and [bold]lognormal(0.01, 1)[/bold] (median, "
            "sigma) pause every step, with a heavy tail. Joined by +."
        ),
    ] = "none",
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="Who waits for whom: [bold]bsp[/bold] everybody for everybody, [bold]ssp(3)[/bold] who is more than "
            "3 steps ahead of the slowest, [bold]asp[/bold] nobody; [bold]drop_slowest(2)[/bold] and "
            "[bold]deadline(0.5)[/bold] go on without the last 2, or after 0.5 s. Repeat it to compare. "
            f"Default: {', '.join(RULES)}."
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="A whole strategy on servers: [bold]server(consistency=ssp(3, eager))[/bold], "
            "[bold]downpour(push=4, fetch=4)[/bold], [bold]elastic(period=10)[/bold], [bold]coded(s=1)[/bold]. "
            "Played from the same text that its workers and servers run. Repeat it to compare.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Bytes pushed and pulled in each step, e.g. [bold]100MB[/bold]; needs --network."),
    ] = None,
    servers: Annotated[int | None, typer.Option(help="Servers that they are spread over. Default: 1.")] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Rate and latency, e.g. [bold]10Gbit,50us[/bold]; a third part such as [bold]8GB/s[/bold] says how "
            "fast a server applies what was pushed. Left out, exchanges take no time."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the stragglers; every rule meets the same ones.")] = 0,
    output: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="text|json",
            help="[bold]json[/bold] prints the result object on stdout and nothing else.",
        ),
    ] = "text",
) -> None:
    """Time per step, waiting and staleness of training with parameter servers, under stragglers."""
    from offbeat.cli.bench import Training, simulated_servers

    if not simulate:
        raise UsageError("bench server works in virtual time only: add --simulate.")
    if output not in ("text", "json"):
        raise UsageError(f"--format {output!r} is unknown: give text or json.")
    asked = Training(workers, steps, step, stragglers, size, servers, network, seed)
    rules = tuple(rule or (() if strategy else RULES))
    simulated_servers(asked, rules, tuple(strategy or ()), output == "json")

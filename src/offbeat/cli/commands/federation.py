"""`offbeat federated`: the server of a federated deployment, and its clients."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from offbeat.cli.display import this_command
from offbeat.cli.options import FederatedClientOptions, FederatedIdentityOptions, FederatedServerOptions
from offbeat.cli.output import FailedError, print_json, printable
from offbeat.errors import CheckpointError, OffbeatError, TaskError, UsageError
from offbeat.federated import server
from offbeat.federated.client import ClientSettings, run_client
from offbeat.federated.peer_file import client_folder, public_key
from offbeat.federated.server import Federation, FederationWatcher
from offbeat.federated.server_work import RoundRecord
from offbeat.protocols.federated.messages import ClientFailure
from offbeat.protocols.federated.round_server import RoundServer
from offbeat.run.job import Script, target_of
from offbeat.runtime.run.folder import RunFolder, part
from offbeat.runtime.run.report import amount, headline, personal_in_words
from offbeat.task import TaskReference

_LINE_EVERY = 5.0
_MOST_NAMED = 5


def serve(options: FederatedServerOptions) -> None:
    """Run a server, and print its result."""
    progress = ServerProgress(quiet=options.as_json)
    try:
        result = _start(options, progress) if options.resume is None else _resume(options, progress)
    except (OffbeatError, KeyboardInterrupt) as error:
        raise FailedError(error, progress.say_how_to_resume()) from error
    if options.as_json:
        print_json(result.plain())
        return
    counts, console = result.federated, Console(file=sys.stdout, highlight=False, soft_wrap=True)
    mark, rest = headline(result)
    rest = rest.replace(f"{result.workers} worker", f"{result.workers} client")
    console.print(Text(mark, style="bold").append(rest, style="not bold"))
    lost = ", ".join(f"{counts[name]:,} {name}" for name in ("late", "dropped", "refused") if counts[name])
    lines = {
        "rounds": f"{counts['rounds']:,}, {counts['failed_rounds']:,} without an update of the model",
        "updates": f"{counts['updates']:,} count" + (f"; {lost}" if lost else ""),
        "traffic": f"{amount(counts['bytes_down'])} to clients, {amount(counts['bytes_up'])} from them",
        **({"personal models": personal_in_words(counts["personal"])} if "personal" in counts else {}),
        "everything is in": str(result.run),
    }
    for name, text in lines.items():
        console.print(f"  {name:<19} {text}", markup=False)


def join(options: FederatedClientOptions) -> None:
    """Take part as a client, and print the fate of its updates."""
    settings = ClientSettings(
        address=options.address,
        data=None if options.data is None else str(options.data),
        part=options.part,
        name=options.name,
        client=options.client,
        keys=None if options.keys is None else str(options.keys),
        server_key=options.server_key,
        peers=None if options.peers is None else str(options.peers),
        out=str(options.out),
        timeout=options.timeout,
    )

    def report(line: str) -> None:
        if not options.as_json:
            print(printable(f"{settings.label}: {line}"), file=sys.stderr, flush=True)

    done = run_client(_task(options.what, options.arguments), settings, report)
    if options.as_json:
        print_json(done.plain())
        return
    fates = ", ".join(f"{count:,} {fate}" for fate, count in sorted(done.rounds.items())) or "none"
    score = "" if done.score is None else f" It scores {done.score:.4g} on own data."
    print(printable(f"Updates of client {done.client}: {fates}. The final model is in {done.model}.{score}"))


def identity(options: FederatedIdentityOptions) -> None:
    """Print a client's public signing key."""
    settings = ClientSettings(
        address="", data=None if options.data is None else str(options.data), part=options.part, name=options.name
    )
    folder = client_folder(options.out, settings.label)
    print(public_key(folder))
    print(printable(f"The signing key of {settings.label}, for the list of peers; {folder} has it."), file=sys.stderr)


def _start(options: FederatedServerOptions, progress: ServerProgress) -> server.Result:
    if options.what is None:
        raise TaskError("nothing to serve: give a task, or --resume RUN.")
    if options.strategy is None:
        raise UsageError("--strategy is missing: say for example 'federated(clients=3, fraction=1)'.")
    federation = server.federation_of(
        _task(options.what, options.arguments),
        options.strategy,
        rounds=options.rounds,
        address=options.address or server.LOOPBACK,
        keys=options.keys,
        peers=None if options.peers is None else str(options.peers),
        first=options.first,
        validate=options.validate,
        seed=options.seed,
        target=options.target,
        silence=options.silence,
        patience=options.patience,
        timeout=options.timeout,
    )
    return server.run_server(_task(options.what, options.arguments), federation, options.out, progress)


def _resume(options: FederatedServerOptions, progress: ServerProgress) -> server.Result:
    for name in ("what", "strategy", "rounds", "peers", "first", "target"):
        if getattr(options, name) is not None:
            raise UsageError(f"--resume goes on as the server was started: omit {name.replace('what', 'the task')}.")
    run = options.resume or Path()
    known = RunFolder.open(run).read()
    if known.get("state") == "finished":
        raise CheckpointError(f"{run} is finished: its last round is over.")
    return server.resume(run, address=options.address, keys=options.keys, watcher=progress)


def _task(text: str, arguments: tuple[str, ...]) -> TaskReference:
    what = target_of(text, arguments)
    if isinstance(what, Script):
        raise TaskError(f"{text!r} is a script, not a task. Name a class in it: '{text}:Class'.")
    return what


class ServerProgress(FederationWatcher):
    """Shows a server's rounds, and what goes wrong at its clients, as lines on stderr."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._folder: RunFolder | None = None
        self._resume = ""
        self._last = 0.0
        self._words = ""

    def begin(self, folder: RunFolder, address: str, federation: Federation) -> None:
        """Say where clients connect."""
        self._folder = folder
        self._resume = f"{this_command()} federated serve --resume {shlex.quote(str(folder.path))}"
        self._line(f"listening at {address} for clients of {federation.strategy} ({folder.path})", always=True)

    def tick(self, machine: RoundServer, now: float) -> None:
        """Say what it waits for, if that takes long."""
        words, state = machine.missing, machine.state
        if state.phase == "gathering":
            waited = state.outstanding
            names = ", ".join(machine.roster.label(client) for client in waited[:_MOST_NAMED])
            more = f" and {len(waited) - _MOST_NAMED:,} more" if len(waited) > _MOST_NAMED else ""
            words = f"round {state.number}: {len(state.round.came):,} updates, waiting for {names}{more}"
        elif state.phase == "finishing":
            words = "handing out the final model"
        if words and (words != self._words or now - self._last > _LINE_EVERY * 6) and now - self._last > _LINE_EVERY:
            self._last, self._words = now, words
            self._line(words)

    def round(self, record: RoundRecord) -> None:
        """A line about a round."""
        outcome, words = record.outcome, [f"round {record.outcome.number}"]
        if record.score is not None:
            words.append(f"score {record.score:.4g}")
        if not math.isnan(record.loss):
            words.append(f"loss {record.loss:.4g}")
        counts = {
            "updates": len(outcome.participants),
            "late": len(outcome.late),
            "dropped": len(outcome.dropped),
            "refused": len(outcome.refused),
        }
        words += [f"{count:,} {name}" for name, count in counts.items() if count or name == "updates"]
        if outcome.failed:
            words.append(f"the model stays: {outcome.failed}")
        self._last = time.monotonic()
        self._line("  ".join([*words, f"{outcome.ended - outcome.started:.2f} s"]))

    def trouble(self, client: str, trouble: ClientFailure) -> None:
        """A client's error, with its own traceback."""
        where = f"round {trouble.number}: " if trouble.number else ""
        self._line(f"{client}: {where}{trouble.error}", always=True)
        if trouble.traceback:
            self._line("\n".join(f"  {line}" for line in trouble.traceback.rstrip().splitlines()), always=True)

    def say_how_to_resume(self) -> dict[str, object]:
        """Say how to go on; returns the result so far."""
        if self._folder is None:
            return {}
        self._line(f"Go on in the same round with: {self._resume}", always=True)
        return part(json.loads(json.dumps(self._folder.read(), default=str)), "result")

    def _line(self, text: str, always: bool = False) -> None:
        if always or not self._quiet:
            print(printable(text), file=sys.stderr, flush=True)

"""The server of a federated deployment: `offbeat federated serve`, and `offbeat.federated.serve`.

It has no data. It selects clients, adds up what they send, moves the model, and keeps on disk all it needs to go on
after it was killed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import torch
from msgspec import structs

from offbeat import limits
from offbeat.errors import CheckpointError, NonFiniteError, StrategyError, TaskError, UsageError, WaitError
from offbeat.federated.description import LARGEST, MOST_STATISTICS
from offbeat.federated.peer_file import read_peers
from offbeat.federated.server_work import RoundRecord, ServerWork
from offbeat.protocols.federated.federation_state import HOPELESS
from offbeat.protocols.federated.messages import SERVER, ClientFailure, FromClient, FromServer
from offbeat.protocols.federated.peers import PeerList
from offbeat.protocols.federated.plan import MOST_PATIENT, RoundPlan
from offbeat.protocols.federated.round_server import RoundServer
from offbeat.protocols.federated.secure.plan import MOST_NEIGHBOURS
from offbeat.protocols.machine import Name
from offbeat.run.job import Script, check_iterative, earlier, plain_target, short_name, target_from_plain, target_of
from offbeat.runtime.messages import Codec, Driver, Endpoint, Keys, named
from offbeat.runtime.run.folder import RunFolder, environment
from offbeat.runtime.run.metrics import Ledger
from offbeat.runtime.run.procfs import passport
from offbeat.runtime.run.result import Result, failure
from offbeat.runtime.run.settings import Goal, Target
from offbeat.runtime.state.random_state import seed_everything
from offbeat.strategies import Combined, Strategy, combined, parse
from offbeat.strategies.federated.personal import compared
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.federated.update_path import rules_of
from offbeat.task import AnyTask, IterativeTask, Task, TaskReference

LOOPBACK: Final = "tcp://127.0.0.1:*"
_TURN: Final = 0.2  # Seconds after which the display is refreshed even if nothing happens.
_DRAIN: Final = 0.5  # Seconds in which last messages leave.


@dataclass(frozen=True)
class Federation:
    """How a server runs its federation; kept in `run.json`, for the process that replaces it."""

    strategy: str
    rounds: int
    seed: int = 0
    first: int | None = None
    """Clients that must be there before the first round; None: all."""
    validate: bool = False
    """Whether the server scores the model, on the task's own validation data; else clients do, on theirs."""
    silence: float = 30.0
    """Seconds without a sign of life after which a client is no longer waited for."""
    patience: float = 10.0
    """Times as long as the slowest client so far took that a round without a deadline waits for one that is at work."""
    timeout: float = 3600.0
    """Seconds to wait for clients before a round can begin."""
    target: str | None = None
    address: str = LOOPBACK
    keys: str | None = None
    """The file with the server's keys, and the public keys of the clients."""
    peers: str | None = None
    """The file with the signing keys of all clients, who sign their secure sums then."""
    identity: str = ""
    """Names this federation among all that a client takes part in."""
    secret: int = 0
    """Seed of the selection of clients where it must stay secret, as privacy needs it; clients know the other seed."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        limits.whole("--rounds", self.rounds, limits.COUNT)
        limits.seed("--seed", self.seed)
        limits.seconds("--silence", self.silence)
        limits.seconds("--timeout", self.timeout)
        if not 1 <= self.patience <= MOST_PATIENT:
            raise UsageError(
                f"--patience {self.patience!r} makes no sense: a client may take this many times as long as the "
                f"slowest of the others, 1 to {MOST_PATIENT:,} times."
            )
        clients = rules_of(self.parsed).clients
        if self.first is not None:
            limits.whole("--first", self.first, clients, why="the number of clients")
        if self.target is not None:
            Target.parse(self.target)
        if self.peers is not None and not rules_of(self.parsed).secure:
            raise UsageError("--peers is for rounds that clients sign, and only secure=True has them. Omit it.")

    @property
    def parsed(self) -> Combined:
        """The strategy; refused if it cannot be deployed."""
        strategy = combined(parse(self.strategy))
        rules = strategy.exchange
        if not isinstance(rules, Federated):
            raise StrategyError(f"{strategy} is not federated: say for example 'federated(clients=3, fraction=1)'.")
        if rules.dropout or rules.speeds is not None:
            raise StrategyError(
                "dropout and speeds are those of simulated clients; real ones have their own. Omit them."
            )
        return strategy

    @property
    def plan(self) -> RoundPlan:
        """The rounds; a sixth of the silence passes between two signs of life, 5 s at most."""
        plan = rules_of(self.parsed).plan()
        beat = min(plan.beat, self.silence / 6)
        return structs.replace(plan, silence=self.silence, beat=beat, patience=self.patience)


class FederationWatcher(Protocol):
    """An observer of a server, such as the display."""

    def begin(self, folder: RunFolder, address: str, federation: Federation) -> None:
        """Clients can connect now."""

    def tick(self, machine: RoundServer, now: float) -> None:
        """Several times a second."""

    def round(self, record: RoundRecord) -> None:
        """A round is closed."""

    def trouble(self, client: str, trouble: ClientFailure) -> None:
        """A client has reported an error, sent what cannot be used, or may not join."""


class _NoWatcher(FederationWatcher):
    """Shows nothing."""


def serve(
    task: AnyTask | str,
    strategy: str | Strategy,
    *,
    rounds: int | None = None,
    address: str = LOOPBACK,
    keys: str | Path | None = None,
    peers: str | Path | None = None,
    first: int | None = None,
    validate: bool = False,
    seed: int = 0,
    target: float | None = None,
    silence: float = 30.0,
    patience: float = 10.0,
    timeout: float = 3600.0,
    out: str | Path = "runs",
    watcher: FederationWatcher | None = None,
) -> Result:
    """Run the rounds of a task with clients that `join`; returns the result when the last one is over.

    `rounds` defaults to as many as pass over the data as often as the task says. `keys` is a key file whose allowed
    keys are those of the clients; without it, only this machine can connect. `Federation` explains the others.
    """
    reference = reference_of(task)
    federation = federation_of(
        reference,
        strategy,
        rounds=rounds,
        address=address,
        keys=keys,
        peers=None if peers is None else str(peers),
        first=first,
        validate=validate,
        seed=seed,
        target=target,
        silence=silence,
        patience=patience,
        timeout=timeout,
    )
    return run_server(reference, federation, Path(out), watcher)


def federation_of(
    reference: TaskReference,
    strategy: str | Strategy,
    *,
    rounds: int | None = None,
    keys: str | Path | None = None,
    target: float | None = None,
    **more: Any,
) -> Federation:
    """A new federation for a task; `more` are its further fields."""
    whole = combined(parse(str(strategy)))
    if rounds is None:
        task = reference.build()
        passes = rules_of(whole).rounds(task.epochs) if isinstance(task, Task) else task.steps
        rounds = passes if isinstance(whole.exchange, Federated) else 1
    return Federation(
        strategy=str(whole),
        rounds=rounds,
        target=None if target is None else f"score={target!r}",
        keys=None if keys is None else str(keys),
        identity=secrets.token_hex(8),
        secret=secrets.randbits(62),
        **more,
    )


def resume(
    run: str | Path,
    *,
    address: str | None = None,
    keys: str | Path | None = None,
    watcher: FederationWatcher | None = None,
) -> Result:
    """Go on with the rounds of a server that was ended, in whichever round it was."""
    config = earlier(Path(run))
    if "federation" not in config:
        raise CheckpointError(f"{run} is not the run of a federated server. Resume it with `offbeat run --resume`.")
    reference = target_from_plain(config["what"])
    if isinstance(reference, Script):
        raise CheckpointError(f"{run} is the run of a script. Resume it with `offbeat run --resume`.")
    try:
        federation = msgspec.convert(config["federation"], Federation)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{run} does not say how its server ran: {error}. Its run.json was changed.") from error
    federation = replace(
        federation,
        address=federation.address if address is None else address,
        keys=federation.keys if keys is None else str(keys),
    )
    return run_server(reference, federation, Path(run), watcher, resumed=True)


def reference_of(task: AnyTask | str) -> TaskReference:
    """The task that is meant; a script is refused."""
    what = target_of(task)
    if isinstance(what, Script):
        raise TaskError(f"{task!r} is a script, not a task. Name a class in it: '{task}:Class'.")
    return what


def run_server(
    reference: TaskReference,
    federation: Federation,
    place: Path,
    watcher: FederationWatcher | None = None,
    *,
    resumed: bool = False,
) -> Result:
    """Run a server: in a new folder below a place, or in the folder of the server that it replaces."""
    keys = None if federation.keys is None else Keys.load(Path(federation.keys))
    enrolled, peers = _enrolled(keys, federation.plan.clients), _peers(federation)
    # As in a simulated run, so that the model starts with the same numbers.
    torch.set_num_threads(1)
    seed_everything(federation.seed)
    task = reference.build()
    if isinstance(task, IterativeTask):
        check_iterative(task, federation.parsed)
    folder = RunFolder.open(place) if resumed else RunFolder.create(place, short_name(reference), federation.strategy)
    serving = _Serving(reference, task, federation, folder, enrolled, keys, peers, watcher or _NoWatcher())
    return serving.run()


class _Serving:
    """One process of a server."""

    def __init__(
        self,
        reference: TaskReference,
        task: AnyTask,
        federation: Federation,
        folder: RunFolder,
        enrolled: list[Name] | None,
        keys: Keys | None,
        peers: PeerList | None,
        watcher: FederationWatcher,
    ) -> None:
        self._reference, self._federation, self._folder, self._watcher = reference, federation, folder, watcher
        target = federation.target or (None if task.target is None else f"score={task.target!r}")
        ledger = Ledger(None if target is None else Target.parse(target))
        strategy, seed = federation.parsed, federation.seed
        self._work = ServerWork(
            task,
            reference,
            strategy,
            seed,
            folder.path,
            ledger,
            rounds=federation.rounds,
            validate=federation.validate,
        )
        self._work.shown = self._closed
        state = self._work.load()
        model, update_bytes = self._work.payload(), self._work.moves.format.nbytes
        every = None if federation.validate else task.evaluate_every or 1
        self.machine = RoundServer(
            SERVER,
            federation.plan,
            seed,
            federation.rounds,
            model,
            update_bytes,
            selection=seed if self._work.rules.privacy is None else federation.secret,
            strategy=str(self._work.strategy),
            federation=federation.identity,
            enrolled=enrolled,
            first=federation.first,
            score_every=every,
            state=state,
            secure=self._work.secure_terms(),
            peers=peers,
        )
        largest = 2 * update_bytes if isinstance(task, Task) else MOST_STATISTICS * torch.float64.itemsize
        codec: Codec[Any] = Codec(FromClient | FromServer, payload_limit=max(LARGEST, 4 * model.nbytes, largest))
        self._endpoint: Endpoint[Any] = Endpoint(
            SERVER, codec, bind=federation.address, keys=keys, named_by_key=keys is not None
        )
        self._refused: dict[str, int] = {}
        self._unfilled = time.monotonic()

    def run(self) -> Result:
        """Run until the last client has the final model."""
        machine, folder = self.machine, self._folder
        known = Goal(strategy=self._federation.strategy, target=self._federation.target, seed=self._federation.seed)
        config = {
            "what": plain_target(self._reference),
            "goal": known.plain(),
            "workers": machine.plan.clients,
            "threads": 1,
            "hosts": None,
            "federation": asdict(self._federation) | {"address": self._endpoint.address},
        }
        folder.write(config=config, environment=environment(), state="running", process=msgspec.to_builtins(passport()))
        try:
            with self._endpoint:
                self._watcher.begin(folder, self._endpoint.address or "", self._federation)
                self._drive()
            if machine.state.fruitless >= HOPELESS:
                good = self._work.ledger.steps - (HOPELESS if machine.state.buffer is None else 0)
                raise NonFiniteError(
                    f"in the last {HOPELESS} rounds no client sent an update that can be used. The model is that of "
                    f"round {good}. What clients reported is above."
                )
        except BaseException as error:
            state = "failed" if isinstance(error, Exception) else "interrupted"
            folder.write(state=state, result=self._result(error).plain())
            raise
        result = self._result()
        folder.write(state="finished", result=result.plain())
        return result

    def _drive(self) -> None:
        machine, store = self.machine, self._work.store
        driver = Driver(
            machine,
            self._endpoint,
            lambda work, _token: self._work.do(work, machine.state),
            after=lambda _event, _effects: store.save(machine.state),
        )
        effects = machine.begin(time.monotonic())
        store.save(machine.state)
        driver.perform(effects)
        while machine.state.phase != "finished":
            driver.turn(_TURN)
            self._look(driver)
        self._work.final(machine.state.round.scores)
        until = time.monotonic() + _DRAIN
        while time.monotonic() < until:  # Farewells leave, and late ones are answered.
            driver.turn(_DRAIN / 4)

    def _look(self, driver: Driver) -> None:
        """Show what has happened, and handle what is no message."""
        machine, now = self.machine, time.monotonic()
        for name, traffic in self._endpoint.traffic.items():
            if traffic.refused > self._refused.get(name, 0):
                self._refused[name] = traffic.refused
                effects = machine.reject(name, "it sent a malformed message, or one that is too large", now)
                self._work.store.save(machine.state)
                driver.perform(effects)
        self._show_troubles()
        self._watcher.tick(machine, now)
        if not machine.missing:
            self._unfilled = now
        elif now - self._unfilled > self._federation.timeout:
            raise WaitError(
                f"waited {now - self._unfilled:.0f} s for clients: {machine.missing}. Start them, lower --first or "
                f"fewest=…, or raise --timeout; then go on with --resume {self._folder.path}."
            )

    def _closed(self, record: RoundRecord) -> None:
        """Show a round, after what went wrong in it."""
        self._show_troubles()
        self._watcher.round(record)

    def _show_troubles(self) -> None:
        machine = self.machine
        for name, trouble in machine.troubles:
            member = machine.state.members.get(name)
            self._watcher.trouble(name if member is None else member.label, trouble)
        machine.troubles.clear()

    def _result(self, error: BaseException | None = None) -> Result:
        machine, work = self.machine, self._work
        state, traffic = machine.state, self._endpoint.traffic.values()
        seconds, ledger = work.seconds, work.ledger
        rules = rules_of(self._federation.parsed)
        counts: Mapping[str, Any] = {
            **state.counts,
            **work.moves.path.aggregation.notes(),
            **_personal(rules, state.round.personal if state.phase in ("finishing", "finished") else []),
            "rounds": state.number,
            "clients": rules.clients,
            "bytes_down": sum(peer.bytes_sent for peer in traffic),
            "bytes_up": sum(peer.bytes_received for peer in traffic),
            "malformed_messages": self._endpoint.refused,
            "unknown_keys": self._endpoint.strangers,
        }
        return Result(
            strategy=self._federation.strategy,
            workers=rules.clients,
            task=str(self._reference),
            run=self._folder.path,
            seed=self._federation.seed,
            steps=ledger.steps,
            epochs=max(1, round(ledger.steps * rules.fraction * rules.epochs)),
            samples=ledger.samples,
            score=ledger.score,
            best_score=ledger.best_score,
            metrics=ledger.metrics,
            target=None if ledger.target is None else str(ledger.target),
            reached_target=ledger.reached if ledger.target is not None else None,
            seconds_to_target=ledger.seconds_to_target,
            seconds=seconds,
            samples_per_second=ledger.samples / seconds if seconds else 0.0,
            core_seconds=ledger.cpu(),
            bytes_sent=counts["bytes_down"] + counts["bytes_up"],
            federated=dict(counts),
            error=None if error is None else failure(error),
        )


def _personal(rules: Federated, scores: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """The result's entry on clients' own models, as far as they have reported scores."""
    if rules.personal is None:
        return {}
    pairs = [(own[0], own[1]) for own in scores if own]
    return {"personal": compared(rules.personal, pairs, len(scores) - len(pairs))}


def _peers(federation: Federation) -> PeerList | None:
    """The signing keys of all clients, if they sign rounds."""
    if federation.peers is None:
        return None
    peers, plan, most = read_peers(Path(federation.peers)), federation.plan, MOST_NEIGHBOURS + 1
    if len(peers.keys) != plan.clients:
        raise UsageError(
            f"{federation.peers} has the keys of {len(peers.keys)} clients, and the strategy has "
            f"clients={plan.clients}. Give one key a line, client 0's first."
        )
    if plan.selected > most:
        raise UsageError(
            f"{plan.selected:,} clients in a round are too many to sign it: {most} can. Lower fraction, or omit "
            f"--peers."
        )
    return peers


def _enrolled(keys: Keys | None, clients: int) -> list[Name] | None:
    """The names of the clients whose keys are enrolled, by their numbers."""
    if keys is None:
        return None
    if len(keys.allowed) != clients:
        raise UsageError(
            f"the key file allows {len(keys.allowed)} clients, and the strategy has clients={clients}. Enrol each with "
            f"`offbeat keys allow FILE PUBLIC`, in the order of their numbers."
        )
    return [named(public) for public in keys.allowed]

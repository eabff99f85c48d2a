"""A client of a federated deployment: `offbeat federated join`, and `offbeat.federated.join`.

It connects to the server, keeps its data, and sends updates of the model only.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from offbeat import limits
from offbeat.errors import RunError, UsageError
from offbeat.federated.background_work import BackgroundWork
from offbeat.federated.client_work import (
    ClientWork,
    already_read,
    folder_data,
    from_folder,
    simulated_part,
)
from offbeat.federated.description import LARGEST, TaskDescription, describe, described, encoded
from offbeat.federated.peer_file import client_folder, read_peers, signing_key
from offbeat.federated.server import reference_of
from offbeat.federated.statistics_work import StatisticsWork, first_statistics
from offbeat.protocols.federated.messages import SERVER, Conclude, FromClient, FromServer, MembershipRequest
from offbeat.protocols.federated.peers import PeerList
from offbeat.protocols.federated.round_client import RoundClient, SecureIdentity
from offbeat.protocols.federated.secure.primitives import identity_public
from offbeat.runtime.messages import Codec, Driver, Endpoint, Inbox, Keys, named
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.task import AnyTask, IterativeTask, TaskReference
from offbeat.worker.federated_statistics import FlatTensors, IterativeModel
from offbeat.worker.task_data import data_of

_TURN: Final = 0.5
_LEAVING: Final = 2.0  # Seconds that an interrupted client takes to say so.


@dataclass(frozen=True)
class Participation:
    """What a client did."""

    client: int
    """Its number."""
    rounds: dict[str, int]
    """How many of its updates were accepted, late or refused."""
    score: float | None
    """Of the final model, on its own validation data."""
    model: Path
    """The final model."""
    personal: tuple[float, ...] | None = None
    """With personal models: the scores of the final model and of this client's own on what it holds out."""

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self) | {"model": str(self.model)}


def join(
    address: str,
    task: AnyTask | str,
    *,
    data: str | Path | None = None,
    part: int | None = None,
    name: str | None = None,
    client: int | None = None,
    keys: str | Path | None = None,
    server_key: str | None = None,
    peers: str | Path | None = None,
    out: str | Path = "runs",
    timeout: float = 600.0,
    report: Callable[[str], None] = lambda _line: None,
) -> Participation:
    """Take part in the rounds of a server until the last one is over.

    `data` is the folder that `Task.client_data` reads; `part` takes instead the part of the task's own data that the
    client of this number has in simulation. `keys` is this client's key file, and `server_key` the server's public key.
    `peers` is a file with the signing keys of all clients, by which it checks that the server invents none.
    """
    return run_client(
        reference_of(task),
        ClientSettings(
            address=address,
            data=None if data is None else str(data),
            part=part,
            name=name,
            client=client,
            keys=None if keys is None else str(keys),
            server_key=server_key,
            peers=None if peers is None else str(peers),
            out=str(out),
            timeout=timeout,
        ),
        report,
    )


@dataclass(frozen=True)
class ClientSettings:
    """How a client takes part."""

    address: str
    data: str | None = None
    part: int | None = None
    name: str | None = None
    client: int | None = None
    keys: str | None = None
    server_key: str | None = None
    peers: str | None = None
    out: str = "runs"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense together."""
        limits.seconds("--timeout", self.timeout)
        for option in ("part", "client"):
            value = getattr(self, option)
            if value is not None:
                limits.whole(f"--{option}", value, limits.SIMULATED_WORKERS, least=0)
        if (self.data is None) == (self.part is None):
            raise UsageError(
                "a client needs data: give --data FOLDER, or, to try things out, --part N for the part of the task's "
                "own data that client N has in simulation. Not both."
            )
        if self.part is not None and self.client not in (None, self.part):
            raise UsageError(f"--part {self.part} is the data of client {self.part}, not of --client {self.client}.")
        if self.server_key is not None and self.keys is None:
            raise UsageError("--server-key needs --keys FILE, this client's own keys.")
        if self.server_key is not None and not re.fullmatch("[0-9a-f]{64}", self.server_key):
            raise UsageError(f"--server-key {self.server_key!r} is not a key: `offbeat keys show FILE` prints it.")

    @property
    def label(self) -> str:
        """What people call this client."""
        if self.name is not None:
            return self.name
        return f"client {self.part}" if self.data is None else Path(self.data).resolve().name

    @property
    def endpoint(self) -> str:
        """The name under which it connects without keys: the same if it is started again."""
        if self.name is not None or self.data is None:
            return self.label
        path = str(Path(self.data).resolve())
        return f"{self.label} {hashlib.blake2b(path.encode(), digest_size=3).hexdigest()}"


def run_client(reference: TaskReference, settings: ClientSettings, report: Callable[[str], None]) -> Participation:
    """Take part as one client."""
    task = reference.build()
    folder = client_folder(Path(settings.out), settings.label)
    peers = None if settings.peers is None else read_peers(Path(settings.peers))
    if isinstance(task, IterativeTask):
        work, description = _summing(reference, task, settings, folder, report)
    else:
        part, module = settings.part or 0, task.model()
        source = simulated_part(task, part) if settings.data is None else from_folder(task, Path(settings.data))
        description = describe(reference, module)
        work = ClientWork(task, module, source, folder, report, masked_only=peers is not None)
    keys = None if settings.keys is None else Keys.load(Path(settings.keys))
    name = settings.endpoint if keys is None else named(keys.public)
    number = settings.part if settings.client is None else settings.client
    identity = _identity(folder, peers)
    public = b"" if identity is None else identity_public(identity.private)
    request = MembershipRequest(settings.label, number, public, b"" if peers is None else peers.digest)
    machine = RoundClient(name, request, encoded(description), settings.timeout, identity)
    limit = max(LARGEST, 4 * work.model_bytes)
    codec: Codec[Any] = Codec(FromClient | FromServer, payload_limit=limit)
    fates: Counter[str] = Counter()
    with Endpoint[Any](name, codec, keys=keys) as endpoint:
        endpoint.connect(SERVER, settings.address, settings.server_key)
        _drive(machine, endpoint, work, fates)
    if machine.failure:
        raise RunError(_failure_in_words(machine, settings))
    client = machine.welcome.client if machine.welcome is not None else -1
    return Participation(client, dict(fates), work.last_score, folder / MODEL_FILE, work.personal)


def _summing(
    reference: TaskReference,
    task: IterativeTask,
    settings: ClientSettings,
    folder: Path,
    report: Callable[[str], None],
) -> tuple[BackgroundWork, TaskDescription]:
    """A client of an iterative task, which reads its data before it joins: it says what statistics it has."""
    if settings.peers is not None:
        raise UsageError(
            f"--peers is for updates that are masked, and statistics of {type(task).__name__} have no bound, so they "
            f"cannot be. Omit it."
        )
    if settings.data is None:
        train, source = data_of(task).train, simulated_part(task, settings.part or 0)
    else:
        data = folder_data(task, Path(settings.data))
        train, source = data.train, already_read(data)
    model = IterativeModel(task)
    statistics = first_statistics(task, model, train)
    work = StatisticsWork(task, model, FlatTensors(statistics, "the statistics"), source, folder, report)
    return work, described(reference, model.initial, statistics)


def _identity(folder: Path, peers: PeerList | None) -> SecureIdentity | None:
    """What the client needs for secure sums; None without the package that does the cryptography."""
    private = signing_key(folder)
    if private is None:
        return None
    if peers is not None and peers.number_of(identity_public(private)) is None:
        raise UsageError(
            f"this client's signing key, {identity_public(private).hex()}, is not in the list of peers. Its key is in "
            f"{folder}: start it with the same --out and --name as `offbeat federated identity`, or add the key."
        )
    return SecureIdentity(private, secrets.token_bytes, None if peers is None else peers.known)


def _drive(machine: RoundClient, endpoint: Endpoint[Any], work: BackgroundWork, fates: Counter[str]) -> None:
    inbox = Inbox(endpoint)
    work.start(inbox)

    def do(item: Any, token: Any) -> Any:
        if isinstance(item, Conclude):
            fates[item.settled.fate] += 1
        return work.do(item, token)

    driver = Driver(machine, endpoint, do, inbox)
    driver.begin()
    try:
        while not machine.ended:
            driver.turn(_TURN)
    except KeyboardInterrupt:
        driver.perform(machine.leave())
        until = time.monotonic() + _LEAVING
        while not machine.ended and time.monotonic() < until:
            driver.turn(_LEAVING / 10)
        raise


def _failure_in_words(machine: RoundClient, settings: ClientSettings) -> str:
    if machine.welcome is None and "no word" in machine.failure:
        keys = " If it runs, this client's key may not be enrolled there, or --server-key be wrong." * bool(
            settings.keys
        )
        return f"{settings.address} did not answer: {machine.failure}. Is the server running?{keys}"
    if machine.welcome is None:
        return f"the server refused this client: {machine.failure}."
    return f"{machine.failure.rstrip('.')}."

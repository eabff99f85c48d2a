"""What a federated client does with its data: it trains in the background, so that its signs of life go on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from offbeat.errors import DataError, OffbeatError, StrategyError
from offbeat.federated.background_work import AbandonedError, BackgroundWork, rules_from
from offbeat.federated.server_model import score_on
from offbeat.federated.vectors import UpdateFormat, packed, unpacked
from offbeat.protocols.federated.client_parts import by_size, held_out
from offbeat.protocols.federated.messages import (
    EncodeUpdate,
    Finish,
    Goodbye,
    RoundTask,
    Settled,
    Trained,
    UpdateSent,
    Welcome,
)
from offbeat.protocols.machine import Payload
from offbeat.protocols.partition import mixed
from offbeat.runtime.federated.aggregation import ClientUpdate
from offbeat.runtime.federated.client_state import ClientState, ClientStates
from offbeat.runtime.federated.exact_sum import ExactSum
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.local_training import LocalTrainer, Visit, check_loss, examples_of
from offbeat.runtime.federated.noise import SystemNoise
from offbeat.runtime.federated.secure_mean import SecureMean, adopt
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.strategies import combined
from offbeat.strategies.federated.personal import MODEL, STREAM, PersonalTrainer
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.federated.update_path import aggregation, layout_of, update_filters
from offbeat.strategies.language.parser import parse_built_in
from offbeat.task import AnyTask, Data, Task
from offbeat.worker.client_data import divided
from offbeat.worker.model_file import save_model
from offbeat.worker.task_data import data_of, size_of


@dataclass(frozen=True)
class HoldingOut:
    """A client's data without what it holds out, and that."""

    data: Data
    held: Dataset[Any]

    @classmethod
    def of(cls, data: Data, rules: Federated, seed: int) -> HoldingOut:
        """Hold some examples out, if personal models are scored on them."""
        if rules.personal is None:
            return cls(data, Subset(data.train, []))
        train, held = held_out(by_size([size_of(data.train)]), rules.personal.held, seed)
        rest = Data(Subset(data.train, train.part(0).tolist()), data.validation, data.test)
        return cls(rest, Subset(data.train, held.part(0).tolist()))


DataSource = Callable[[Federated, int], HoldingOut]
"""Gets a client's data, once the rules and the seed are known."""
PERSONAL_FILE: Final = "personal.safetensors"
"""The client's own model, in its folder."""


def from_folder(task: AnyTask, folder: Path) -> DataSource:
    """A client's data, read by its task from a folder, once it is needed."""
    check_folder(folder)
    return lambda rules, seed: HoldingOut.of(folder_data(task, folder), rules, seed)


def check_folder(folder: Path) -> None:
    """Refuse a folder that does not exist."""
    if not folder.is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. Give --data the folder with this client's data.")


def folder_data(task: AnyTask, folder: Path) -> Data:
    """What a task reads from a client's folder."""
    check_folder(folder)
    data: Any = task.client_data(folder)
    if not isinstance(data, Data):
        raise DataError(
            f"{type(task).__name__}.client_data() is a {type(data).__name__}. Return offbeat.Data(train, "
            f"validation, test)."
        )
    if isinstance(data.train, IterableDataset):
        raise DataError("the training data is a stream, and a client goes over its examples in random order.")
    return data


def already_read(data: Data) -> DataSource:
    """A client's data, of which nothing is held out."""

    def same(_rules: Federated, _seed: int) -> HoldingOut:
        return HoldingOut(data, Subset(data.train, []))

    return same


def simulated_part(task: AnyTask, client: int) -> DataSource:
    """The part of the task's own data that this client has in simulation."""

    def take(rules: Federated, seed: int) -> HoldingOut:
        data = data_of(task)
        parts, count = divided(data.train, task, rules, "iid", seed), size_of(data.validation)
        own = range(client * count // rules.clients, (client + 1) * count // rules.clients)
        # Held out of all parts at once, as in simulation.
        parts, held = (parts, None) if rules.personal is None else held_out(parts, rules.personal.held, seed)
        own_data = Data(Subset(data.train, parts.part(client).tolist()), Subset(data.validation, own), data.test)
        return HoldingOut(own_data, Subset(data.train, [] if held is None else held.part(client).tolist()))

    return take


@dataclass
class _Outfit:
    """What a client trains with."""

    client: int
    data: Data
    held: Dataset[Any]
    """What no model is trained on; personal models are scored on it."""
    rules: Federated
    trainer: LocalTrainer
    schedule: Any
    side: Any
    start: Tensor | None
    filters: tuple[Any, ...]
    layout: Any
    format: UpdateFormat
    states: ClientStates | None
    personal: PersonalTrainer | None
    own: ClientStates
    """Where the client's own model is kept."""
    secure: SecureMean | None
    """Encodes updates for secure sums."""
    advanced: int = 0
    """How often the schedule was advanced."""


@dataclass
class ClientWork(BackgroundWork):
    """A client's model and data: it trains."""

    task: Task
    module: nn.Module
    source: DataSource
    folder: Path
    report: Callable[[str], None]
    """Shows a line."""
    masked_only: bool = False
    """Whether it takes part only where updates are masked, whatever the server wants."""
    _flat: FlatModel = field(init=False)
    _unsettled: dict[int, list[tuple[ClientStates, ClientState]]] = field(
        default_factory=dict[int, "list[tuple[ClientStates, ClientState]]"]
    )
    _unsent: ClientUpdate | None = None  # Waits for its secure sum.
    _number: int = 0  # The round that it trains for.
    _outfit: _Outfit | None = None

    def __post_init__(self) -> None:
        self._flat = FlatModel(self.module)

    @property
    def model_bytes(self) -> int:
        """Size of the model."""
        return self._flat.nbytes

    # In the background.

    def _prepare(self, welcome: Welcome) -> int:
        rules = rules_from(welcome)
        strategy = combined(parse_built_in(welcome.strategy))
        if self.masked_only and not rules.secure:
            raise StrategyError(_unmasked(welcome.strategy))
        parted, task, flat = self.source(rules, welcome.seed), self.task, self._flat
        data, examples = parted.data, size_of(parted.data.train)
        optimizer = task.optimizer(flat.parameters)

        def loss(batch: Any) -> Tensor:
            if self._number in self._abandoned:
                raise AbandonedError
            return check_loss(task.loss(flat.module, batch), type(task).__name__)

        def trainer(seed: int, epochs: int) -> LocalTrainer:
            size = None if rules.batch == "full" else rules.batch
            return LocalTrainer(flat, optimizer, loss, examples_of(data.train, task.collate), seed, epochs, size)

        own = None if (setting := rules.personal) is None else trainer(mixed(welcome.seed, STREAM), setting.epochs)
        server = rules.algorithm.server(flat, rules.clients)
        layout = layout_of(strategy, flat)
        filters = update_filters(strategy, layout, welcome.seed)
        keeps = rules.algorithm.keeps_state or any(each.keeps_state for each in filters)
        sums = aggregation(strategy, layout, welcome.seed, SystemNoise()) if rules.secure else None
        self._outfit = _Outfit(
            client=welcome.client,
            data=data,
            held=parted.held,
            rules=rules,
            trainer=trainer(welcome.seed, rules.epochs),
            schedule=task.schedule(optimizer),
            side=rules.algorithm.client(flat, server),
            start=server.start_message(),
            filters=filters,
            layout=layout,
            format=UpdateFormat.of(layout, filters),
            states=ClientStates(self.folder / (welcome.federation or "state")) if keeps else None,
            personal=None if setting is None or own is None else PersonalTrainer(setting, own),
            own=ClientStates(self.folder / f"{welcome.federation or 'state'}-personal"),
            secure=sums if isinstance(sums, SecureMean) else None,
        )
        self.report(f"joined as client {welcome.client}, with {examples:,} examples: {welcome.strategy}")
        return examples

    def _train(self, task: RoundTask, model: Payload) -> Trained:
        outfit = self._ready()
        base = self._received(outfit, model)
        self._number = task.number
        score, scored = self._score(outfit, base) if task.score else (None, 0)
        asynchronous = outfit.rules.algorithm.buffer is not None
        self._advance(outfit, task.version if asynchronous else task.number - 1)
        self.report(f"round {task.number}: training" + ("" if score is None else f" (score {score:.4g})"))
        visit = Visit(outfit.client, task.number, np.arange(size_of(outfit.data.train), dtype=np.int64))
        state = None if outfit.states is None else outfit.states.read(outfit.client, task.number)
        self._unsettled = {task.number: self._trained_own(outfit, visit, base)}
        if outfit.rules.algorithm.whole_gradient:
            result = outfit.trainer.gradient(visit, base)
        else:
            result = outfit.trainer.train(visit, base, outfit.side, state)
        # Where updates are summed securely, none is sent as a message of its own.
        update, own = result.update, outfit.format.compression if outfit.secure is None else None
        for each in outfit.filters:
            update = update if each is own else each.apply(update, outfit.client, task.number, state)
        if state is not None and outfit.states is not None:
            self._unsettled[task.number].append((outfit.states, state))
        if outfit.secure is not None:
            size = float(size_of(outfit.data.train))
            copy = update.detach().clone()
            self._unsent = ClientUpdate(outfit.client, copy, None, size, result.loss, result.examples, state)
            return self._held_back(task.number, copy, score, scored)
        message = UpdateSent(task.number, result.loss, result.examples, score, scored, task.version)
        extra = result.extra if outfit.layout.extra else None
        if own is None:
            return Trained(message, packed([update, extra]))
        if not ExactSum.fits(update):  # Some of what it has would be lost on the way, and the rest added up.
            return Trained(message, Payload(0))
        code = own.encode(update, outfit.client, task.number, state)
        return Trained(message, packed([code, update[outfit.layout.trainable :], extra]))

    def _held_back(self, number: int, update: Tensor, score: float | None, scored: int) -> Trained:
        """An update that stays here until its secure sum begins; nothing about it is said but whether it has NaN."""
        # Under privacy not even that: of an update with NaN only the noise is sent.
        sound = self._ready().rules.privacy is not None or bool(torch.isfinite(update).all())
        return Trained(UpdateSent(number, 0.0 if sound else math.nan, 0, score, scored), Payload(0))

    def _encode(self, work: EncodeUpdate) -> Any:
        """The update as integers; or, as text, why there are none."""
        sums, sent = self._ready().secure, self._unsent
        if sums is None or sent is None or work.number != self._number:
            return "it has no update of this round"
        if unlike := adopt(sums, work.encoding, work.number, work.fewest):
            return unlike
        try:
            return sums.encode(sent)
        except OffbeatError as error:
            return str(error)

    def _trained_own(self, outfit: _Outfit, visit: Visit, base: Tensor) -> list[tuple[ClientStates, ClientState]]:
        """Train the client's own model, if it has one; it is kept if the update counts."""
        if outfit.personal is None or not outfit.personal.setting.trains_in_rounds:
            return []
        kept = outfit.personal.in_round(visit, base, outfit.own.read(outfit.client, visit.number))
        return [] if kept is None else [(outfit.own, kept)]

    def _own_scores(self, outfit: _Outfit, number: int, base: Tensor) -> tuple[float, ...] | None:
        """Scores of the final model and of the client's own, which becomes a file; None without examples for it."""
        examples = size_of(outfit.data.train)
        if outfit.personal is None or not examples or not size_of(outfit.held):
            return None
        visit = Visit(outfit.client, number, np.arange(examples, dtype=np.int64))
        kept = outfit.own.read(outfit.client, number + 1)
        result = outfit.personal.scores(visit, base, kept, lambda: score_on(self.task, self.module, outfit.held))
        if result is None:
            return ()
        self._flat.load(result[1].tensors[MODEL])
        save_model(self.module, self.folder / PERSONAL_FILE)
        return result[0]

    def _keep(self, finish: Finish, model: Payload) -> Goodbye:
        outfit = self._ready()
        base = self._received(outfit, model)
        self._flat.load(base)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_model(self.module, self.folder / MODEL_FILE)
        score, scored = self._score(outfit, base) if finish.score else (None, 0)
        self._advance(outfit, finish.number)
        self._number = -1  # Nobody abandons this.
        self.personal = self._own_scores(outfit, finish.number, base)
        own = "; its own model {:.4g} instead of {:.4g} on what it held out".format(*reversed(self.personal or (0, 0)))
        words = "" if score is None else f": score {score:.4g} on own data"
        self.report(f"the last round is over{words}{own if self.personal else ''}")
        return Goodbye(score, scored, self.personal)

    def _ready(self) -> _Outfit:
        if self._outfit is None:
            raise DataError("the server has sent a task before this client was ready.")
        return self._outfit

    def _received(self, outfit: _Outfit, model: Payload) -> Tensor:
        """The global parameters of a payload; a further vector goes to where the algorithm expects it."""
        layout = outfit.layout
        vectors = unpacked(model, 1 if outfit.start is None else 2, layout.size, layout.dtype)
        if outfit.start is not None:
            outfit.start.copy_(vectors[1])
        return vectors[0]

    def _score(self, outfit: _Outfit, base: Tensor) -> tuple[float | None, int]:
        data = outfit.data.validation
        count = size_of(data)
        if not count:
            return None, 0
        self._flat.load(base)
        self.last_score = score_on(self.task, self.module, data)
        return self.last_score, count

    def _advance(self, outfit: _Outfit, rounds: int) -> None:
        """Bring the learning-rate schedule to where it is after so many rounds."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It is advanced for rounds that others trained in, too.
            while outfit.schedule is not None and outfit.advanced < rounds:
                outfit.schedule.step()
                outfit.advanced += 1

    # On the machine's thread.

    def _conclude(self, settled: Settled) -> None:
        number, fate, why = settled.number, settled.fate, settled.why
        self.report(f"round {number}: {fate}" + (f": {why}" if why else ""))
        pending, outfit = self._unsettled.pop(number, []), self._outfit
        if fate == "accepted" and outfit is not None:
            for states, state in pending:
                states.write(outfit.client, number, state, number)


def _unmasked(strategy: str) -> str:
    return (
        f"the server runs {strategy}, which sends each update as it is, and this client was started with a list of "
        f"peers for updates that are masked. Ask for secure=True, or omit --peers."
    )

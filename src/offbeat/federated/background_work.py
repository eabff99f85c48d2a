"""Work of a federated client in the background, so that its signs of life go on meanwhile."""

from __future__ import annotations

import queue
import threading
import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from offbeat.errors import StrategyError
from offbeat.protocols.federated.messages import (
    Abandon,
    ClientFailure,
    Conclude,
    EncodeUpdate,
    Finish,
    Goodbye,
    KeepFinal,
    Prepare,
    RoundTask,
    Settled,
    Train,
    Trained,
    Welcome,
)
from offbeat.protocols.federated.secure.client import MaskWork
from offbeat.protocols.machine import Done, Payload
from offbeat.runtime.messages import Inbox
from offbeat.strategies import combined
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.language.parser import parse_built_in

LONGEST_TEXT: Final = 20_000
"""Characters of a traceback that are sent."""


class AbandonedError(Exception):
    """The update of this round is not wanted any more."""


@dataclass
class BackgroundWork(ABC):
    """A client's background thread, and the order of what it does."""

    last_score: float | None = field(default=None, init=False)
    """Of the last model that it scored, on its own validation data."""
    personal: tuple[float, ...] | None = field(default=None, init=False)
    """Scores of the final model and of this client's own on what it holds out."""
    _jobs: queue.SimpleQueue[tuple[Any, Any]] = field(default_factory=queue.SimpleQueue[Any], init=False)
    _abandoned: set[int] = field(default_factory=set[int], init=False)
    _inbox: Inbox | None = field(default=None, init=False)

    @property
    @abstractmethod
    def model_bytes(self) -> int:
        """Size of the model."""

    def start(self, inbox: Inbox) -> None:
        """Start the background thread, which hands its results to the machine."""
        self._inbox = inbox
        threading.Thread(target=self._labour, name="client work", daemon=True).start()

    def do(self, work: Any, _token: Any) -> Any:
        """Do work of the machine, now or in the background."""
        match work:
            case Abandon(number):
                self._abandoned.add(number)
            case Conclude(settled):
                self._conclude(settled)
            case Train(task):
                self._jobs.put((work, ("train", task.number)))
            case EncodeUpdate():
                self._jobs.put((work, ("encode", work.number)))
            case MaskWork():
                return work()
            case KeepFinal():
                self._jobs.put((work, "final"))
            case _:
                self._jobs.put((work, "ready"))
        return None

    def _labour(self) -> None:
        torch.set_num_threads(1)  # As in simulation: with several, sums inside an operator depend on their number.
        while True:
            work, token = self._jobs.get()
            number = work.task.number if isinstance(work, Train) else 0
            try:
                result = self._result(work)
            except AbandonedError:
                result = None
            except BaseException as error:
                text = "".join(traceback.format_exception(error))
                result = ClientFailure(number, f"{type(error).__name__}: {error}"[:LONGEST_TEXT], text[-LONGEST_TEXT:])
            if self._inbox is not None:
                self._inbox.put(Done(token, result))

    def _result(self, work: Any) -> Any:
        match work:
            case Prepare(welcome):
                return self._prepare(welcome)
            case Train(task, model):
                return self._train(task, model)
            case KeepFinal(finish, model):
                return self._keep(finish, model)
            case EncodeUpdate():
                return self._encode(work)
            case _:
                raise TypeError(type(work).__name__)

    # In the background.

    @abstractmethod
    def _prepare(self, welcome: Welcome) -> int:
        """Get the data ready; returns how many examples it has."""

    @abstractmethod
    def _train(self, task: RoundTask, model: Payload) -> Trained:
        """What the client sends for a round."""

    @abstractmethod
    def _keep(self, finish: Finish, model: Payload) -> Goodbye:
        """Keep the final model."""

    def _encode(self, work: EncodeUpdate) -> Any:
        """The update as integers; or, as text, why there are none."""
        del work
        return "its updates are not summed securely"

    # On the machine's thread.

    @abstractmethod
    def _conclude(self, settled: Settled) -> None:
        """A turn is over."""


def rules_from(welcome: Welcome) -> Federated:
    """The rules by which a server that lets a client join runs its rounds; refused if it is not federated."""
    strategy = combined(parse_built_in(welcome.strategy))
    if not isinstance(strategy.exchange, Federated):
        raise StrategyError(f"the server runs {strategy}, which is not federated.")
    return strategy.exchange

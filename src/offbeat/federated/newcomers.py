"""Who may join a federation by its task: the same model and task as the server's, the same statistics as the first."""

from __future__ import annotations

from msgspec import structs

from offbeat.federated.description import StatisticForms, bad_statistics, decoded, difference
from offbeat.federated.server_model import ServerModel, StatisticsModel
from offbeat.federated.store import ServerStore
from offbeat.protocols.federated.messages import Examined
from offbeat.protocols.machine import Payload
from offbeat.task import TaskReference


class Newcomers:
    """Compares clients that want to join with the server; the first with statistics fixes what all of them sum."""

    def __init__(self, model: ServerModel, reference: TaskReference, store: ServerStore) -> None:
        self._model, self._store = model, store
        self._own = model.describe(reference)

    def load(self) -> None:
        """Continue with what a client of an earlier process has fixed."""
        if forms := self._store.read_statistics():
            self._expect(forms)

    def examine(self, description: Payload) -> Examined:
        """Whether a client's model and task are those of the server."""
        other = decoded(description)
        if isinstance(other, str):
            return Examined(other)
        why = difference(self._own, other) or bad_statistics(other.statistics)
        if not why and other.statistics and not self._own.statistics:
            if not isinstance(self._model, StatisticsModel):
                return Examined("it has statistics, and the server's task has none")
            self._store.write_statistics(other.statistics)
            self._expect(other.statistics)
        return Examined(why, self._model.format.nbytes)

    def _expect(self, forms: StatisticForms) -> None:
        """Clients sum statistics of these forms."""
        self._own = structs.replace(self._own, statistics=forms)
        if isinstance(self._model, StatisticsModel):
            self._model.expect(forms)

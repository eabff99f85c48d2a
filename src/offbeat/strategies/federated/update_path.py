"""The way of an update from a client's training to the move of the model, as a strategy says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.runtime.federated.aggregation import Aggregation, ExactMean, UpdateFilter, UpdateLayout
from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.noise import NoiseSource, SeededNoise
from offbeat.runtime.federated.privacy import PrivateMean
from offbeat.runtime.federated.private_secure_mean import PrivateSecureMean
from offbeat.runtime.federated.round_scale import RoundScale
from offbeat.runtime.federated.secure_mean import KeptNumbers, SecureMean
from offbeat.strategies._base import Combined
from offbeat.strategies.compressors import Compressing, Quantize
from offbeat.strategies.federated.compressed_updates import CompressFilter, RepayFilter
from offbeat.strategies.federated.strategy import Federated


@dataclass(frozen=True)
class UpdatePath:
    """What happens to updates: filters at the client, one after the other, and one aggregation of all clients'."""

    layout: UpdateLayout
    filters: tuple[UpdateFilter, ...]
    aggregation: Aggregation
    params_bytes: int | None = None
    """Bytes of the global parameters; None: as many as of an update."""

    @property
    def keeps_state(self) -> bool:
        """Whether a filter keeps something of each client between rounds."""
        return any(each.keeps_state for each in self.filters)

    @property
    def model_bytes(self) -> int:
        """Bytes that a client downloads in a round."""
        return self._message_bytes[0]

    @property
    def update_bytes(self) -> int:
        """Bytes that a client uploads in a round."""
        return self._message_bytes[1]

    @property
    def _message_bytes(self) -> tuple[int, int]:
        """Bytes that a client downloads and uploads in a round."""
        down = self.layout.nbytes if self.params_bytes is None else self.params_bytes
        up, more = self.layout.nbytes, self.layout.nbytes if self.layout.extra else 0
        for each in self.filters:
            up = each.update_bytes(self.layout.size, up)
        return self.aggregation.message_bytes(down + more, up + more)

    def filtered(self, update: Tensor, client: int, number: int, state: ClientState | None) -> Tensor:
        """An update as the client sends it."""
        for each in self.filters:
            update = each.apply(update, client, number, state)
        return update


def update_path(strategy: Combined, model: FlatModel, seed: int, noise: NoiseSource | None = None) -> UpdatePath:
    """The whole path: for a process that simulates clients and server, or with the system's noise for a real server."""
    layout = layout_of(strategy, model)
    return UpdatePath(layout, update_filters(strategy, layout, seed), aggregation(strategy, layout, seed, noise))


def layout_of(strategy: Combined, model: FlatModel) -> UpdateLayout:
    """What the updates of this model hold."""
    more = rules_of(strategy).algorithm.sends_more
    return UpdateLayout(model.values.numel(), model.trainable, model.values.dtype, more)


def update_filters(strategy: Combined, layout: UpdateLayout, seed: int) -> tuple[UpdateFilter, ...]:
    """The filters of a client, in the order in which they are applied."""
    compressions, rules = _encoding(strategy), rules_of(strategy)
    own = rules.robust.secret_filters() if rules.secure and rules.robust is not None else ()
    if compressions:
        return (*own, CompressFilter(compressions, layout, seed))
    if (scale := _scale(strategy)) is not None and scale.owes:
        return (*own, RepayFilter(cast("Compressing", strategy.compressions[0]), layout))
    return own


def aggregation(strategy: Combined, layout: UpdateLayout, seed: int, noise: NoiseSource | None = None) -> Aggregation:
    """The aggregation of the server; noise for privacy follows from the seed unless it has a source of its own."""
    rules = rules_of(strategy)
    if (terms := rules.privacy_terms) is not None:
        if layout.trainable < layout.size:
            raise StrategyError(
                f"{rules.privacy} cannot be used with a model that has floating-point buffers, such as the running "
                f"statistics of batch normalization: clients send them as well, and with noise a variance becomes "
                f"negative. Use layers without them, such as GroupNorm or LayerNorm."
            )
        source = SeededNoise(seed) if noise is None else noise
        if rules.secure:
            kept, scale = _kept(strategy, layout, seed), _scale(strategy)
            return PrivateSecureMean(layout, rules.plan(), seed, terms, source, kept, scale)
        return PrivateMean(layout, terms, source)
    if rules.secure:
        return SecureMean(layout, rules.plan(), seed, _kept(strategy, layout, seed), _scale(strategy))
    return ExactMean(layout) if rules.robust is None else rules.robust.aggregation(layout)


def _kept(strategy: Combined, layout: UpdateLayout, seed: int) -> KeptNumbers | None:
    """The numbers of an update that are masked and summed; None: all."""
    compressions = _encoding(strategy)
    return CompressFilter(compressions, layout, seed).kept if compressions else None


def _encoding(strategy: Combined) -> tuple[Compressing, ...]:
    """The compressors that encode an update by itself, so not the one whose scale is that of a secure sum."""
    compressions = cast("tuple[Compressing, ...]", strategy.compressions)
    return compressions if _scale(strategy) is None else compressions[:-1]


def _scale(strategy: Combined) -> RoundScale | None:
    """The scale by which updates of a secure sum are quantized; None: they are not."""
    compressions = cast("tuple[Compressing, ...]", strategy.compressions)
    last = compressions[-1] if compressions else None
    if not rules_of(strategy).secure or not isinstance(last, Quantize):
        return None
    # Under privacy rounding is never owed: it would take the noise out of the sum again.
    return RoundScale(last.bits, compressions[0].owes and rules_of(strategy).privacy is None)


def rules_of(strategy: Combined) -> Federated:
    """The federated part of a strategy."""
    return cast("Federated", strategy.exchange)

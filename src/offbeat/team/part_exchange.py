"""The exchange of a worker that has a part of the model: it begins when the model is cut, in the first step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from offbeat.runtime.split.absent import is_absent
from offbeat.runtime.split.mesh import Mesh
from offbeat.runtime.state.checkpoint_manager import Holdings
from offbeat.runtime.tensor_parallel.layers import cut_of
from offbeat.strategies.allreduce import sparse_parameters
from offbeat.strategies.worker.capabilities import Starter
from offbeat.strategies.worker.exchange import Exchange
from offbeat.strategies.worker.flat_rows import Rows


class PartExchange:
    """Keeps a resumed exchange's state until the model is cut: only then is it known what this worker exchanges."""

    def __init__(self, exchange: Exchange, mesh: Mesh, holdings: Holdings) -> None:
        self._exchange, self._mesh, self._holdings = exchange, mesh, holdings
        self._tied: list[tuple[int, Parameter]] = []
        self._uncut = Rows(())
        self._begun = False
        self._handles: list[RemovableHandle] = []
        self._saved: Mapping[str, Any] | None = None

    def begin(self, part: nn.Module, stages: Mapping[Parameter, Sequence[int]] | None = None) -> None:
        """The model is cut: exchange this part of it with the workers that have the same part.

        `stages` are those of the parameters that several stages have.
        """
        exchange, self._begun = self._exchange, True
        if exchange.group.size > 1 or not exchange.starts_alike:
            if exchange.updates_elsewhere:
                part = self._own_one_copy(part, stages or {})
            elif exchange.compressions:
                for parameters in self._held_elsewhere_too(part, stages or {}):
                    exchange.install(nn.ParameterList(parameters))
            exchange.install(part)
            if isinstance(exchange, Starter):
                exchange.begin()
        saved, self._saved = self._saved, None
        if saved is not None:
            exchange.load_state_dict(saved)
        self.refresh()

    def _own_one_copy(self, part: nn.Module, stages: Mapping[Parameter, Sequence[int]]) -> nn.Module:
        """The parameters of which this worker has the only copy, or the one that the others of its replica follow."""
        place, owned = self._mesh.place, list[Parameter]()
        self._tied = [(users[0], parameter) for parameter, users in stages.items()]
        self._uncut = Rows(p for p in part.parameters() if place.ways > 1 and cut_of(p) is None)
        for parameter in part.parameters():
            first_way = place.ways == 1 or place.way == 0 or cut_of(parameter) is not None
            if first_way and stages.get(parameter, (place.stage,))[0] == place.stage:
                owned.append(parameter)
        for optimizer in self._holdings.optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        return nn.ParameterList(owned)

    def _after_step(self, *_: Any) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Take over what others update for the whole replica: tied weights, and what all ways have. Collective."""
        with torch.no_grad():
            for owner, parameter in self._tied:
                values = torch.empty(parameter.shape, dtype=parameter.dtype) if is_absent(parameter) else parameter.data
                self._mesh.pipeline.share(values, "the sharing of a tied weight", owner)
            if self._uncut.tensors:
                rows, ways = self._uncut.read(), self._mesh.tensor
                self._uncut.write([ways.share(row, "the sharing of weights") for row in rows])

    def _held_elsewhere_too(
        self, part: nn.Module, stages: Mapping[Parameter, Sequence[int]]
    ) -> Iterator[list[Parameter]]:
        """Parameters that other workers of the replica have too, by who has them.

        What is compressed together depends on each other: these are compressed without others, so that they stay equal.
        """
        ways = self._mesh.place.ways
        groups: dict[Hashable, list[Parameter]] = {}
        sparse = sparse_parameters(part)
        for parameter in part.parameters():
            of = tuple(stages.get(parameter, ()))
            if id(parameter) not in sparse and (of or (ways > 1 and cut_of(parameter) is None)):
                groups.setdefault((of, cut_of(parameter) is None), []).append(parameter)
        for key in sorted(groups, key=str):
            yield groups[key]

    def state_dict(self) -> dict[str, Any]:
        """The exchange's state."""
        return self._exchange.state_dict() if self._saved is None else dict(self._saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it, when the model is cut."""
        if self._begun:
            self._exchange.load_state_dict(state)
        else:
            self._saved = state

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

"""The prepared objects of a loop that a checkpoint saves: models, optimizers, loaders, and other stateful ones."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat.errors import CheckpointError
from offbeat.runtime.data.loaders import Loader
from offbeat.runtime.state.tensor_tree import like


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state that can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore the state."""
        ...


class Holdings:
    """The objects given to `team.prepare`, in order."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.loaders: list[Loader] = []
        self.others: list[Stateful] = []
        self._searched = False

    def has(self, thing: object) -> bool:
        """Whether this very object is one of them."""
        return any(thing is known for known in (*self.models, *self.optimizers, *self.loaders, *self.others))

    @property
    def trained_loader(self) -> Loader | None:
        """The loader whose epochs are counted: the first one used for training."""
        trained = (loader for loader in self.loaders if loader.epoch or loader.resume_at is not None)
        return next(trained, self.loaders[0] if self.loaders else None)

    @property
    def epoch(self) -> int | None:
        """The current epoch, from 1; None without a loader."""
        loader = self.trained_loader
        return None if loader is None else loader.trained_epochs

    @property
    def examples(self) -> int | None:
        """The number of training examples; None if it is unknown beforehand."""
        try:
            return len(cast("Any", self.trained_loader).dataset)
        except (AttributeError, TypeError):
            return None

    def replicas(self) -> dict[str, Any]:
        """Parameters and optimizer state."""
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_replicas(self, state: Mapping[str, Any], models: Sequence[int], optimizers: Sequence[int]) -> None:
        """Restore the models and optimizers of these numbers."""
        for i in models:
            try:
                self.models[i].load_state_dict(_entry(state, "models", i))
            except RuntimeError as error:
                raise CheckpointError(f"the checkpoint's model does not fit this one: {error}") from error
        for i in optimizers:
            try:
                self.optimizers[i].load_state_dict(_entry(state, "optimizers", i))
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"the checkpoint's optimizer does not fit this one: {error}") from error

    def buffers(self) -> list[dict[str, Any]]:
        """Running statistics and so on, which may differ between replicas."""
        return [dict(model.named_buffers()) for model in self.models]

    def load_buffers(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore them."""
        try:
            with torch.no_grad():
                for model, saved in zip(self.models, state, strict=True):
                    for name, buffer in model.named_buffers():
                        buffer.copy_(saved[name])
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint's buffers do not fit this run's models: {error}") from error

    def trainable(self) -> list[list[bool]]:
        """Which parameters of each model are trainable."""
        return [[p.requires_grad for p in model.parameters()] for model in self.models]

    def load_trainable(self, state: Sequence[Sequence[bool]]) -> None:
        """Restore which parameters are trainable."""
        for model, flags in zip(self.models, state, strict=True):
            for parameter, flag in zip(model.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)

    def find_schedulers(self) -> None:
        """Add the learning-rate schedulers of the optimizers, even if they were not given to `prepare`.

        A scheduler knows its optimizer, but not vice versa, so all live objects are searched.
        """
        if self._searched:
            return
        self._searched = True
        known = [id(other) for other in self.others]
        live = [item for item in gc.get_objects() if issubclass(type(item), LRScheduler) and id(item) not in known]
        nested = [id(inner) for outer in (*live, *self.others) for inner in getattr(outer, "_schedulers", ())]
        optimizers = [id(optimizer) for optimizer in self.optimizers]
        ours = [s for s in live if id(getattr(s, "optimizer", None)) in optimizers and id(s) not in nested]
        # Live objects come in no order, but saved states must match up in another process.
        self.others += sorted(ours, key=lambda s: (optimizers.index(id(s.optimizer)), type(s).__name__))

    def other_states(self) -> list[list[Any]]:
        """States of schedulers and other objects, each with its class name."""
        return [[type(other).__name__, other.state_dict()] for other in self.others]

    def load_others(self, states: Sequence[Sequence[Any]]) -> None:
        """Restore them."""
        waiting = [list(entry) for entry in states]
        for other in self.others:
            kind = type(other).__name__
            entry = next((entry for entry in waiting if entry[0] == kind), None)
            if entry is None:
                raise CheckpointError(
                    f"the checkpoint holds no state for a {kind}. Resume with the script that wrote it."
                )
            waiting.remove(entry)
            now = other.state_dict()
            other.load_state_dict({key: like(value, now.get(key)) for key, value in entry[1].items()})


def _entry(state: Mapping[str, Any], kind: str, number: int) -> dict[str, Any]:
    held = cast("list[dict[str, Any]]", state[kind])
    if number >= len(held):
        raise CheckpointError(
            f"the checkpoint holds {len(held)} {kind}, this run has more. Resume with the script that wrote it."
        )
    return held[number]

"""The state of one logical model of which every worker holds a part: dropped where it is not needed, and put together.

Each parameter and buffer belongs to the first stage that uses it. Elsewhere a parameter keeps its shape but has no
memory. `whole` brings everything together for a while, for evaluations and checkpoints, which see one model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import UsageError
from offbeat.runtime.gradients.power_sums import power_sums
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.untrusted_files import parse_json
from offbeat.runtime.split.absent import mark_absent
from offbeat.runtime.state.tensor_tree import put_together, take_apart

_WHAT = "the gathering of the model"
PowerSums = Callable[[Sequence[Parameter], float], list[float]]
"""For each gradient, the sum of its magnitudes to a power; of the whole one, where ways share the parameters."""


class SplitState:
    """Which stage holds what of a model and its optimizers."""

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Iterable[nn.Module]],
        group: DirectGroup,
        optimizers: list[Optimizer],
        sums: PowerSums = power_sums,
    ) -> None:
        self._group, self._optimizers, self._power_sums = group, optimizers, sums
        users: dict[int, list[int]] = {}
        for stage, modules in enumerate(stages):
            held = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
            for key in {id(tensor) for tensor in held}:
                users.setdefault(key, []).append(stage)
        self._parameters = list(model.parameters())
        self.users = {number: tuple(users.get(id(p), (0,))) for number, p in enumerate(self._parameters)}
        """The stages that use each parameter, by its number; stage 0 keeps what nobody uses."""
        self.own = [p for number, p in enumerate(self._parameters) if group.rank in self.users[number]]
        """The parameters of this stage."""
        self.foreign = [p for number, p in enumerate(self._parameters) if group.rank not in self.users[number]]
        """The parameters of other stages, which have no memory here."""
        self._by_owner: list[list[Tensor]] = [[] for _ in range(group.size)]
        for number, parameter in enumerate(self._parameters):
            self._by_owner[self.users[number][0]].append(parameter)
        for buffer in model.buffers():
            self._by_owner[users.get(id(buffer), [0])[0]].append(buffer)
        self._depth = 0

    @property
    def is_whole(self) -> bool:
        """Whether the model is put together at the moment."""
        return self._depth > 0

    def shed(self) -> None:
        """Free the memory of what this stage does not use."""
        for parameter in self.foreign:
            parameter.grad = None
            # Not zeros: what reads it by mistake shall not look right.
            nothing = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
            parameter.data = parameter.data.new_full((), nothing).expand(parameter.shape)
            mark_absent(parameter, True)
            for optimizer in self._optimizers:
                optimizer.state.pop(parameter, None)

    @contextmanager
    def whole(self, optimizers: bool = False) -> Generator[None]:
        """Inside, this worker has the whole model, and perhaps the optimizers' whole state. A collective call."""
        gradients = [parameter.grad for parameter in self.foreign]  # One may stand for those of other stages.
        if self._depth == 0:
            self._gather()
        if optimizers:
            self._gather_optimizers()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.shed()
                for parameter, gradient in zip(self.foreign, gradients, strict=True):
                    parameter.grad = gradient

    def _gather(self) -> None:
        for parameter in self.foreign:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            mark_absent(parameter, False)
        with torch.no_grad():
            for stage, tensors in enumerate(self._by_owner):
                for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
                    same = [tensor for tensor in tensors if tensor.dtype == kind and tensor.numel()]
                    row = torch.cat([tensor.detach().reshape(-1) for tensor in same])
                    self._group.share(row, _WHAT, stage)
                    if stage == self._group.rank:
                        continue
                    for tensor, piece in zip(same, row.split([tensor.numel() for tensor in same]), strict=True):
                        tensor.copy_(piece.view(tensor.shape))

    def _gather_optimizers(self) -> None:
        places = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for optimizer in self._optimizers:
            members = [p for group in optimizer.param_groups for p in group["params"]]
            held = optimizer.state_dict()["state"]  # Whole also where it is divided over replicas.
            for stage in range(self._group.size):
                mine = {
                    number: held[number]
                    for number, p in enumerate(members)
                    if number in held and self.users[places[id(p)]][0] == stage
                }
                for number, state in shared_tree(self._group, mine, stage).items():
                    if self._group.rank not in self.users[places[id(members[number])]]:
                        optimizer.state[members[number]] = state

    def shared(self) -> list[tuple[int, tuple[int, ...], Parameter]]:
        """The parameters that several stages use: number, stages, parameter."""
        numbered = enumerate(self._parameters)
        return [(number, self.users[number], p) for number, p in numbered if len(self.users[number]) > 1]

    @property
    def is_somewhere_complete(self) -> bool:
        """Whether some stage has all parameters that are trained."""
        trained = [self.users[number] for number, p in enumerate(self._parameters) if p.requires_grad]
        return any(all(stage in users for users in trained) for stage in range(self._group.size))

    def norm_elsewhere(self, order: float) -> float:
        """The norm of the gradients of parameters that this stage does not have. Collective."""
        if order < 0:
            raise UsageError(f"gradients of several stages have no joint norm of order {order:g} here. Use 2 or inf.")
        largest = order == float("inf")
        rank, shared = self._group.rank, self.shared()
        tied = {number for number, _, _ in shared}
        alone = [p for number, p in enumerate(self._parameters) if self.users[number] == (rank,) and number not in tied]
        here = [p for _, users, p in shared if users[0] == rank]
        sums = self._power_sums([*alone, *here], order)
        terms, counted = sums[: len(alone)], iter(sums[len(alone) :])
        own = [next(counted) if users[0] == rank else 0.0 for _, users, _ in shared]
        rows = self._group.gather([max(terms, default=0.0) if largest else sum(terms), *own], "a norm of gradients")
        others = [float(rows[stage, 0]) for stage in range(self._group.size) if stage != rank]
        others += [float(rows[users[0], 1 + place]) for place, (_, users, _) in enumerate(shared) if rank not in users]
        total = max(others, default=0.0) if largest else sum(others)
        return total if largest or order == 0 else total ** (1 / order)

    def memory(self) -> dict[str, int]:
        """Bytes of this stage's parameters, of gradients as large, and of the optimizers' state."""
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        return {
            "parameters": sum(parameter.nbytes for parameter in self.own),
            "gradients": sum(parameter.nbytes for parameter in self.own if parameter.requires_grad),
            "optimizer": sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor)),
        }


def shared_tree(group: DirectGroup, tree: Mapping[Any, Any], root: int) -> dict[Any, Any]:
    """Nested plain data and tensors of the worker `root`, on every worker."""
    tensors: dict[str, Tensor] = {}
    raw = torch.zeros(0, dtype=torch.uint8)
    if group.rank == root:
        data = take_apart(dict(tree), "state", tensors)
        forms = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
        raw = torch.frombuffer(bytearray(json.dumps([data, forms]).encode()), dtype=torch.uint8)
    length = int(group.share(torch.tensor([raw.numel()]), _WHAT, root))
    raw = group.share(raw if group.rank == root else torch.zeros(length, dtype=torch.uint8), _WHAT, root)
    data, forms = parse_json(raw.numpy().tobytes().decode())
    for name, (kind, *shape) in forms.items():
        if group.rank != root:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, kind))
        group.share(tensors[name], _WHAT, root)
    return put_together(data, tensors)

"""Which of torch's optimizers can run on slices of parameters."""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

ELEMENT_WISE: dict[str, type[Optimizer]] = {
    kind.__name__: kind
    for kind in (
        *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta),
        *(optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop),
    )
}
"""Optimizers that treat every number by itself, by name."""

_REASONS: dict[type[Optimizer], str] = {
    optim.LBFGS: "it searches along one direction for all parameters together",
    optim.Adafactor: "it keeps means over rows and columns, and scales each parameter's step by its norm",
    optim.Muon: "it orthogonalizes each matrix as a whole",
    optim.SparseAdam: "it takes sparse gradients, and slices are exchanged dense",
}


def why_not(kind: type[Optimizer], by_rate: bool = False) -> str:
    """Why this optimizer cannot run on a slice of the parameters; empty if it can.

    `by_rate` if every worker's gradient is a step of its own, with a share of the learning rate.
    """
    if kind is optim.Rprop and by_rate:
        return "its steps do not follow the learning rate, by which each worker's push is weighed here"
    if kind in ELEMENT_WISE.values():
        return ""
    return _REASONS.get(kind, f"{kind.__module__}.{kind.__qualname__} is not known to treat every number by itself")

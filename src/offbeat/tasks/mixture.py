"""A mixture of Gaussians by expectation-maximization: learning without gradients, whose likelihood only ever grows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from offbeat.task import Data, IterativeTask
from offbeat.tasks._common import check_at_least, divide, generator, once, tensors_of

_FLOOR = 1e-3  # The smallest variance: a component may not shrink onto one example, where the likelihood is infinite.
_CANDIDATES = 20  # Examples tried for each mean to start from.
_TRIES = 10  # Sets of first means that are drawn, to begin from the best.


@dataclass(eq=False)
class Mixture(IterativeTask):
    """Find the weights, means and variances (one per feature) of Gaussians from examples that they generated.

    All of it is in float64, so that the sums of any number of workers agree to rounding. The target is the
    score of the mixture that made the data, less two free parameters per training example: a fit to n examples is
    expected to lose half a parameter per example to it, so this is reached unless the start is unlucky.

    Its arguments:
    - `components`: how many Gaussians.
    - `features`: numbers in an example.
    - `examples`: how many, over all three parts; a tenth each goes to validation and test.
    - `seed`: of the data and of the first means.
    - `separation`: how far apart the true means are, in standard deviations of the components (0.5 to 1.5 each).
    """

    steps = 200

    components: int = 5
    features: int = 4
    examples: int = 5000
    seed: int = 0
    separation: float = 2.5

    def __post_init__(self) -> None:
        check_at_least(1, components=self.components, features=self.features)
        check_at_least(max(10, 2 * self.components), examples=self.examples)
        check_at_least(0, separation=self.separation)
        free = self.components - 1 + 2 * self.components * self.features
        reachable = self.score(self._truth, [tensors_of(self.data().validation)])
        self.target = reachable - 2 * free / len(tensors_of(self.data().train)[0])

    @once
    def data(self) -> Data:
        """Examples of one tensor each: as many floats as there are features."""
        source = generator(self.seed + 1)
        truth = self._truth
        chosen = torch.multinomial(truth["weight"], self.examples, replacement=True, generator=source)
        noise = torch.randn(self.examples, self.features, dtype=torch.float64, generator=source)
        values = truth["mean"][chosen] + noise * truth["variance"][chosen].sqrt()
        return divide(values, validation=self.examples // 10, test=self.examples // 10)

    @cached_property
    def _truth(self) -> Mapping[str, Tensor]:
        """The mixture that generates the data."""
        source = generator(self.seed)
        shape = (self.components, self.features)
        cloud = torch.randn(_CANDIDATES * self.components, self.features, dtype=torch.float64, generator=source)
        weight = 1 + torch.rand(self.components, dtype=torch.float64, generator=source)
        return {
            "weight": weight / weight.sum(),
            "mean": self.separation * _covering(cloud, self.components, source),
            "variance": (0.5 + torch.rand(shape, dtype=torch.float64, generator=source)).square(),
        }

    def initial(self) -> Mapping[str, Tensor]:
        """Equal weights, means at examples that cover the data well, and the variances of all the data."""
        (values,) = tensors_of(self.data().train)
        source = generator(self.seed + 2)
        tries = [_covering(values, self.components, source) for _ in range(_TRIES)]
        mean = min(tries, key=lambda means: _spread(values, means))
        return {
            "weight": torch.full((self.components,), 1 / self.components, dtype=torch.float64),
            "mean": mean,
            "variance": values.var(dim=0).clamp(min=_FLOOR).expand_as(mean).clone(),
        }

    def statistics(self, params: Mapping[str, Tensor], batch: Any) -> Mapping[str, Tensor]:
        """The E step: each component's share of the examples, and of their values and squares."""
        (values,) = batch
        share = torch.softmax(_joint(params, values), dim=1)
        return {"count": share.sum(dim=0), "sum": share.T @ values, "square": share.T @ values.square()}

    def update(self, params: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The M step, in closed form; a component without examples stays where it is, with weight zero."""
        count = total["count"].unsqueeze(1)
        empty = count < torch.finfo(torch.float64).tiny
        mean = torch.where(empty, params["mean"], total["sum"] / count)
        variance = torch.where(empty, params["variance"], total["square"] / count - mean.square())
        # The best variance above the floor is the nearest one, so with the floor the likelihood still only grows.
        return {
            "weight": total["count"] / total["count"].sum(),
            "mean": mean,
            "variance": variance.clamp(min=_FLOOR),
        }

    def score(self, params: Mapping[str, Tensor], data: Iterable[Any]) -> float:
        """The mean log-likelihood of an example, in nats."""
        total, seen = 0.0, 0
        for (values,) in data:
            total += float(torch.logsumexp(_joint(params, values), dim=1).sum())
            seen += len(values)
        return total / max(seen, 1)


def _covering(values: Tensor, count: int, source: torch.Generator) -> Tensor:
    """Examples such that every other is near one of them: greedy k-means++ (Arthur and Vassilvitskii 2007).

    Means that start in the same cluster seldom part, and means at outliers seldom return; this avoids most of both.
    """
    means = values[torch.randint(len(values), (1,), generator=source)]
    nearest = torch.cdist(values, means).squeeze(1).square()
    while len(means) < count:
        tried = torch.multinomial(nearest, _CANDIDATES, replacement=True, generator=source)
        distances = torch.minimum(nearest.unsqueeze(1), torch.cdist(values, values[tried]).square())
        best = int(distances.sum(dim=0).argmin())
        means = torch.cat([means, values[tried[best : best + 1]]])
        nearest = distances[:, best]
    return means


def _spread(values: Tensor, means: Tensor) -> float:
    """The mean squared distance of an example to the nearest of the means."""
    return float(torch.cdist(values, means).amin(dim=1).square().mean())


def _joint(params: Mapping[str, Tensor], values: Tensor) -> Tensor:
    """The log of weight times density, for each example (rows) and component (columns)."""
    mean, variance = params["mean"], params["variance"]
    distance = ((values.unsqueeze(1) - mean).square() / variance).sum(dim=2)
    return params["weight"].log() - (distance + (2 * math.pi * variance).log().sum(dim=1)) / 2

"""Which data each client has, and how fast clients are: settings of `federated`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.strategies._base import Setting


@dataclass(frozen=True)
class ClientData(Setting):
    """How the training data is divided over the clients."""


@dataclass(frozen=True)
class IIDClients(ClientData):
    """At random, in equal parts."""

    name: ClassVar[str] = "iid"


@dataclass(frozen=True)
class DirichletClients(ClientData):
    """Each label is spread over the clients by shares from Dirichlet(alpha): small alpha gives few labels to each."""

    name: ClassVar[str] = "dirichlet"
    alpha: float
    """0.1 is very skewed, 100 almost even."""

    _ranges = (("alpha", lambda alpha: alpha > 0, "shares are drawn with a number above 0"),)


@dataclass(frozen=True)
class LabelShards(ClientData):
    """Examples sorted by label are cut into shards of equal size, and each client gets a few of them."""

    name: ClassVar[str] = "shards"
    labels: int = 2
    """Shards of each client, which has at most about as many labels."""

    _ranges = (("labels", lambda labels: labels >= 1, "a client gets one shard or more"),)


@dataclass(frozen=True)
class QuantitySkew(ClientData):
    """At random, in parts whose sizes are drawn from Dirichlet(alpha)."""

    name: ClassVar[str] = "quantity"
    alpha: float
    """0.1 gives a few clients nearly everything, 100 almost the same to each."""

    _ranges = (("alpha", lambda alpha: alpha > 0, "shares are drawn with a number above 0"),)


@dataclass(frozen=True)
class TaskClients(ClientData):
    """As the task says: `Task.client_of(example)`."""

    name: ClassVar[str] = "task"


@dataclass(frozen=True)
class LognormalSpeeds(Setting):
    """Clients whose speeds differ: how long each takes for a round, in simulated seconds."""

    name: ClassVar[str] = "lognormal"
    sigma: float = 0.5
    """Spread: a client slower than 84 % of all takes e^sigma times as long as the median."""
    median: float = 10.0
    """Seconds of a client of median speed with an average number of examples."""
    bandwidth: float | None = None
    """Median bytes per second of a client's link, each way; None: links take no time."""

    _ranges = (
        ("sigma", lambda sigma: sigma >= 0, "a spread is 0 or more"),
        ("median", lambda seconds: seconds > 0, "training takes longer than 0 s"),
        ("bandwidth", lambda rate: rate is None or rate > 0, "a link carries more than 0 bytes per second"),
    )

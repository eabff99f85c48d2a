"""Federated learning as a strategy: clients keep their data, and rounds of some of them improve one model.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from torch import nn

from offbeat.errors import StrategyError, UsageError
from offbeat.limits import SIMULATED_WORKERS
from offbeat.protocols.federated.plan import ClientSpeeds, RoundPlan
from offbeat.runtime.federated.privacy import PrivacyTerms
from offbeat.runtime.federated.secure_mean import check_survivors
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies._base import Axis, Strategy, Traits, require
from offbeat.strategies.compressors import Compressing, Quantize, RandomK
from offbeat.strategies.federated.algorithms import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedBuff,
    FederatedAlgorithm,
    FedProx,
    FedSGD,
    FedYogi,
    Scaffold,
)
from offbeat.strategies.federated.clients import (
    DirichletClients,
    IIDClients,
    LabelShards,
    LognormalSpeeds,
    QuantitySkew,
    TaskClients,
)
from offbeat.strategies.federated.personal import Ditto, Finetune
from offbeat.strategies.federated.privacy import Privacy
from offbeat.strategies.federated.robust import KrumRule, MedianRule, NormBound, TrimmedMean
from offbeat.strategies.worker.exchange import Exchange, Exchanging

MOST_CLIENTS: Final = SIMULATED_WORKERS
_AVERAGE: Final = FedAvg()


@dataclass(frozen=True)
class Federated(Exchanging):
    """Clients keep their data; in every round some of them train the model, and the server averages their updates.

    Clients are simulated: the workers divide the clients of a round between them, and the result has the same bits
    with any number of workers. A step of the run is a round. `offbeat federated` runs the same task on real clients.
    """

    clients: int = 100
    """Number of clients."""
    fraction: float = 0.1
    """Share of the clients that are selected for a round."""
    epochs: int = 1
    """Passes of a client over its data in a round."""
    batch: int | Literal["full"] = 10
    """Examples of a client's step; `full` is all that it has. Iterative tasks take all at once."""
    algorithm: FedAvg | FedSGD | FedProx | Scaffold | FedAdagrad | FedAdam | FedYogi | FedBuff = _AVERAGE
    """What clients and server compute beside plain averaging."""
    data: IIDClients | DirichletClients | LabelShards | QuantitySkew | TaskClients | None = None
    """How the training data is divided over the clients; None: as --parts says."""
    sampling: Literal["uniform", "poisson"] | None = None
    """How a round's clients are drawn: a fixed number, or each with the same probability; None: poisson for privacy."""
    over: float = 1.0
    """Factor by which more clients are selected than are needed; the first to answer count."""
    deadline: float | None = None
    """Seconds after which a round ends with the updates that have come."""
    fewest: int = 1
    """Updates that a round needs; with fewer the model stays as it is."""
    speeds: LognormalSpeeds | None = None
    """How fast clients are; None: equally fast."""
    dropout: float = 0.0
    """Probability that a selected client never answers."""
    privacy: Privacy | None = None
    """Bound on what the models reveal about a client; None: there is none."""
    robust: MedianRule | TrimmedMean | KrumRule | NormBound | None = None
    """How updates are combined if some clients may lie; None: by the mean."""
    personal: Finetune | Ditto | None = None
    """How each client gets a model of its own, which stays there; None: there is only the global one."""
    secure: bool = False
    """Whether updates are masked, so that the server learns their sum only; needs over two thirds of the selected."""

    promises = Traits(deterministic=True, refuses_updates=True)
    aliases: ClassVar = {
        "fedavg": "federated",
        "fedsgd": "federated(batch=full, algorithm=fedsgd)",
        "fedbuff": "federated(algorithm=fedbuff(10))",
        "fedadagrad": "federated(algorithm=fedadagrad)",
        "fedadam": "federated(algorithm=fedadam)",
        "fedyogi": "federated(algorithm=fedyogi)",
        "scaffold": "federated(algorithm=scaffold)",
    }
    examples = (
        "federated(clients=50, fraction=0.2, epochs=5)",
        "federated(clients=1000, algorithm=fedprox(0.01), data=dirichlet(0.3))",
        "federated(algorithm=fedbuff(10), speeds=lognormal(sigma=0.8))",
        "federated(clients=1000, fraction=0.05, privacy=privacy(epsilon=8.0, delta=0.0001))",
        "federated(fraction=0.2, over=1.2, secure=True)",
        "federated(clients=200, fraction=0.2, privacy=privacy(epsilon=8.0, delta=0.001), secure=True)",
        "federated(secure=True) + randomk(0.1)",
        "federated(secure=True) + quantize(4)",
        "federated + quantize(4)",
    )
    carries = True
    point_to_point = True
    unplanned = "who takes part is drawn for each round, and clients are simulated: their workers exchange one sum"
    _ranges = (
        ("clients", lambda clients: 1 <= clients <= MOST_CLIENTS, f"there are 1 to {MOST_CLIENTS:,} clients"),
        ("fraction", lambda share: 0 < share <= 1, "it is the share of clients in a round: above 0, at most 1"),
        ("epochs", lambda epochs: epochs >= 1, "a client makes one pass over its data or more"),
        ("batch", lambda batch: batch == "full" or batch >= 1, "a batch has one example or more"),
        ("over", lambda over: 1 <= over <= 10, "it is a factor from 1 to 10"),
        ("deadline", lambda seconds: seconds is None or seconds > 0, "a round lasts longer than 0 s"),
        ("fewest", lambda fewest: fewest >= 1, "a round needs one update or more"),
        ("dropout", lambda share: 0 <= share < 1, "it is a probability below 1"),
    )

    def __post_init__(self) -> None:
        """Refuse rounds that could never count."""
        super().__post_init__()
        if self.privacy is not None:
            self._check_private(self.privacy)
        try:
            self._check_robust()
            plan = self.plan()
            if self.secure:
                self._check_secure(plan)
        except StrategyError:
            raise  # It names the strategy already.
        except UsageError as error:
            raise StrategyError(f"federated: {error}") from error

    def _check_private(self, privacy: Privacy) -> None:
        """Refuse what the account of privacy would not cover."""
        reasons = (
            (
                self.sampling == "uniform",
                "sampling=uniform",
                "its account takes for granted that each client takes part independently of the others. Omit it, or "
                "say sampling=poisson",
            ),
            (
                self.algorithm.sends_more,
                f"algorithm={self.algorithm}",
                "its clients send a second vector, which would have to be clipped and accounted for as well. Use "
                "fedavg, fedprox or a server optimizer",
            ),
            (
                self.algorithm.buffer is not None,
                f"algorithm={self.algorithm}",
                "which clients it asks depends on which have answered, and its account needs independent draws. Use "
                "fedavg, fedprox or a server optimizer",
            ),
            (
                self.fewest > 1,
                f"fewest={self.fewest}",
                "whether the model moves would then show how many clients took part, in which one may make the "
                "difference. Omit it",
            ),
            (
                self.over != 1,
                f"over={self.over:g}",
                "which clients count would depend on their speed, and its account needs independent draws. Omit it",
            ),
            (
                self.robust is not None,
                f"robust={self.robust}",
                "its noise is measured by what one client changes in a clipped sum, and the rule takes no such sum. "
                "Omit it",
            ),
        )
        for refused, name, why in reasons:
            require(not refused, self, "privacy", privacy, f"it cannot go with {name}: {why}")

    def _check_robust(self) -> None:
        """Refuse a robust rule where it would protect from nothing."""
        rule, algorithm = self.robust, self.algorithm
        if rule is None:
            return
        if algorithm.sends_more:
            raise StrategyError(
                f"{rule} cannot go with {algorithm}, whose clients send control variates beside their "
                f"updates: those would be summed as they are, lies included. Use fedavg or fedprox."
            )
        if algorithm.buffer is not None and rule.needs_single_updates:
            raise StrategyError(
                f"{rule} cannot go with {algorithm}: it counts every update once, and {algorithm.name} "
                f"counts stale ones less. Use normbound, or another algorithm."
            )
        rule.check(RoundPlan(clients=self.clients, fraction=self.fraction).needed)

    def _check_secure(self, plan: RoundPlan) -> None:
        """Refuse what cannot be done with updates of which only the sum is known, and rounds that could never count."""
        refused: tuple[tuple[str, object, str], ...] = (
            (
                "algorithm",
                self.algorithm if self.algorithm.buffer is not None else None,
                "clients mask their updates against each other, so all of a round must start together. Use fedavg",
            ),
            (
                "algorithm",
                self.algorithm if self.algorithm.sends_more else None,
                "control variates have no bound by which they could become integers. Use fedavg or fedprox",
            ),
            (
                "robust",
                self.robust if self.robust is not None and self.robust.needs_single_updates else None,
                "the server cannot see which update is unlike the others. Use normbound, or omit one of them",
            ),
        )
        for name, value, why in refused:
            require(value is None, self, "secure", True, f"it cannot go with {name}={value}: {why}")
        check_survivors(plan)

    def refuses(self, other: Strategy) -> str | None:
        """What has no place beside rounds of clients."""
        if self.secure and isinstance(other, Compressing) and (why := _not_summed(other, self.privacy)):
            return why
        if other.axis is Axis.WHEN:
            return "its clients train on their own between two rounds anyway. Say epochs=… in federated(...)"
        if other.axis is Axis.SPLIT:
            return "each client trains the whole model"
        if isinstance(other, Compressing) and (form := other.format()) is not None and not form.fixed:
            return (
                f"the length of {other}'s messages is known only when they are made, and clients' links and deadlines "
                f"are simulated beforehand. Use topk"
            )
        return None

    def check_hosts(self, hosts: int) -> None:
        """Refuse several hosts where clients keep a state in the run's folder."""
        keeping = self.algorithm if self.algorithm.keeps_state else self.personal
        if hosts > 1 and keeping is not None:
            raise StrategyError(
                f"{keeping} keeps the clients' state in the run's folder, which {hosts} hosts do not share. Put all "
                f"workers on one host, or leave it out."
            )

    def check_iterative(self, task: str) -> None:
        """Refuse what only gradient descent has, for a task that has none."""
        if self.privacy is not None:
            raise StrategyError(
                f"{self.privacy} cannot be used with {task}: its clients send statistics, whose size has nothing to do "
                f"with that of an update, so no bound to clip them by is right. Omit it."
            )
        if self.secure:
            raise StrategyError(
                f"secure=True cannot be used with {task}: its clients send statistics, and to become integers numbers "
                f"need a bound, which statistics do not have. Omit it."
            )
        gradients = {
            "algorithm": (self.algorithm, _AVERAGE),
            "epochs": (self.epochs, 1),
            "personal": (self.personal, None),
        }
        for name, (value, plain) in gradients.items():
            if value != plain:
                raise StrategyError(
                    f"{name}={value} cannot be used with {task}: its clients send statistics of all their data, and do "
                    f"not train. Omit it."
                )

    def rounds(self, epochs: int) -> int:
        """The rounds in which as many examples are seen as in this many passes over all data."""
        return max(1, math.ceil(epochs / (self.fraction * self.epochs) - 1e-9))

    def plan(self) -> RoundPlan:
        """The rounds, as the server's machine and its simulation know them."""
        speeds = self.speeds
        return RoundPlan(
            clients=self.clients,
            fraction=self.fraction,
            poisson=self.sampling == "poisson" or self.privacy is not None,
            over=self.over,
            deadline=self.deadline,
            fewest=self.fewest if self.robust is None else max(self.fewest, self.robust.fewest),
            speeds=None if speeds is None else ClientSpeeds(speeds.median, speeds.sigma, speeds.bandwidth or math.inf),
            dropout=self.dropout,
            buffer=self.algorithm.buffer,
        )

    @property
    def privacy_terms(self) -> PrivacyTerms | None:
        """What is fixed about the privacy of a run; None if there is none."""
        if (privacy := self.privacy) is None:
            return None
        return PrivacyTerms(
            self.clients,
            self.fraction,
            privacy.delta,
            privacy.clip,
            noise=privacy.noise,
            limit=privacy.limit,
            participants_known=self.secure,
        )

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: counts of what clients and server would have sent."""
        return FederatedWorker(group, stopwatch)


def _not_summed(compression: Compressing, privacy: Privacy | None) -> str:
    """Why messages of a compressor cannot be summed under masks; empty if they can."""
    if not isinstance(compression, RandomK | Quantize):
        return (
            f"of updates that secure=True masks only the sum is known, and messages of {compression} must be decoded "
            f"before they are summed, because each client chooses its own places or scale. Use randomk or quantize, "
            f"whose places and scale all clients of a round share, or omit one of them"
        )
    if privacy is not None and isinstance(compression, Quantize):
        if compression.bits < 8:
            return (
                f"{compression} leaves too few integers for the noise of {privacy}, which needs some for each of the "
                f"24 deviations that it may range over. Use quantize(8, stochastic=True), or omit one of them"
            )
        if compression.owes:
            return (
                f"{compression} rounds the noise of {privacy} together with the update, and what is then owed to the "
                f"next round would take the noise out again. Say quantize(8, stochastic=True), which owes nothing"
            )
    return ""


class FederatedWorker(Exchange):
    """Counts the traffic of simulated clients; the rounds themselves are `offbeat.worker.federated`."""

    starts_alike = False
    unpredicted = Federated.unplanned

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        super().__init__(group, stopwatch)
        self._traffic = 0
        self.latest: dict[str, float] = {}
        """Figures of the aggregation at the latest report."""
        self.rounds: dict[str, float] = {}
        """What is counted over the rounds so far, such as updates, late and dropped clients; and simulated seconds."""

    def install(self, model: nn.Module) -> None:
        """Refuse a loop of the user's own."""
        del model
        raise StrategyError(
            "federated trains many clients, each on data of its own, so it cannot run inside a loop: it needs a task "
            "(model, data, criterion, optimizer), as in `offbeat run mine.py:Task --strategy federated`."
        )

    def weigh(self, examples: int, total: int | None) -> None:
        """Batches are the clients'."""

    def suspend(self, held: bool) -> None:
        """Clients train alone anyway."""

    def count(self, nbytes: int) -> None:
        """Clients and server would have sent this much; counted on one worker."""
        self._traffic += nbytes

    def payload(self) -> int:
        """Bytes that clients and server would have sent, in place of what the workers that simulate them did send."""
        return self._traffic - self.group.bytes_sent

    def figures(self) -> dict[str, Any]:
        """What became of the clients' updates, and what the aggregation says, such as the privacy spent."""
        return {**({"rounds": dict(self.rounds)} if self.rounds else {}), **self.latest}

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"traffic": self._traffic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting."""
        self._traffic = int(state["traffic"])


__all__ = ["Federated", "FederatedAlgorithm", "FederatedWorker"]

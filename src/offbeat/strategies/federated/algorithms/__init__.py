"""Federated algorithms: what a client does beside plain local steps, and what the server does with the mean update."""

from offbeat.strategies.federated.algorithms.adaptive import FedAdagrad, FedAdam, FedYogi
from offbeat.strategies.federated.algorithms.base import ClientSide, FederatedAlgorithm, ServerSide
from offbeat.strategies.federated.algorithms.fedavg import FedAvg
from offbeat.strategies.federated.algorithms.fedbuff import FedBuff
from offbeat.strategies.federated.algorithms.fedprox import FedProx
from offbeat.strategies.federated.algorithms.fedsgd import FedSGD
from offbeat.strategies.federated.algorithms.scaffold import Scaffold

__all__ = [
    "ClientSide",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedBuff",
    "FedProx",
    "FedSGD",
    "FedYogi",
    "FederatedAlgorithm",
    "Scaffold",
    "ServerSide",
]

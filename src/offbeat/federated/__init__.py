"""Federated learning on real clients: a server that has no data, and clients that keep theirs."""

from offbeat.federated.client import Participation, join
from offbeat.federated.server import serve

__all__ = ["Participation", "join", "serve"]

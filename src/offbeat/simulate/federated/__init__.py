"""Federated learning in virtual time."""

from offbeat.simulate.federated.rounds import (
    ClientTimes,
    Flight,
    Participant,
    RoundOutcome,
    RoundProgress,
    VirtualRounds,
    staleness_factor,
)

__all__ = [
    "ClientTimes",
    "Flight",
    "Participant",
    "RoundOutcome",
    "RoundProgress",
    "VirtualRounds",
    "staleness_factor",
]

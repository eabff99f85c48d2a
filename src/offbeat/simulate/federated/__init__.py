"""Federated learning in virtual time."""

from offbeat.simulate.federated.rounds import (
    ClientTimes,
    Flight,
    Participant,
    RoundClosing,
    RoundOutcome,
    RoundProgress,
    VirtualRounds,
    close,
    participant,
)

__all__ = [
    "ClientTimes",
    "Flight",
    "Participant",
    "RoundClosing",
    "RoundOutcome",
    "RoundProgress",
    "VirtualRounds",
    "close",
    "participant",
]

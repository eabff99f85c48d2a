"""FedSGD: every client of the cohort sends the gradient of all its data, and the server steps.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.strategies.federated.algorithms.base import FederatedAlgorithm


@dataclass(frozen=True)
class FedSGD(FederatedAlgorithm):
    """One step of the task's optimizer with the cohort's gradient, weighted by examples."""

    name: ClassVar[str] = "fedsgd"
    whole_gradient: ClassVar[bool] = True

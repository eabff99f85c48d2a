"""Rounds of pfl's simulation, for benchmarks/federated.py: run by the interpreter that has pfl, as torchrun would."""

# Its peer is installed in another environment than the one in which types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportUnknownLambdaType=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

import logging
import sys

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

from _gate import CLIENTS, COHORT, EXAMPLES, RATE, Gate, network, problem


class Network(nn.Module):
    """The network with what pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:  # noqa: A002
        self.train(not eval)
        return nn.functional.cross_entropy(self(inputs), labels)

    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> dict[str, Weighted]:  # noqa: A002
        return {"loss": Weighted(float(self.loss(inputs, labels, eval).detach()) * len(inputs), len(inputs))}


class GateCallback(TrainingProcessCallback):
    """Waits at the gate every few rounds."""

    def __init__(self, gate: Gate, rounds: int, model: Network) -> None:
        self._gate, self._rounds, self._model = gate, rounds, model
        self._data = problem()

    def _wait(self) -> bool:
        with torch.no_grad():
            return self._gate.wait(float(self._model.loss(*self._data, eval=True)))

    def on_train_begin(self, **_: object) -> Metrics:
        self._wait()
        return Metrics()

    def after_central_iteration(self, *_: object, central_iteration: int, **__: object) -> tuple[bool, Metrics]:
        return (central_iteration + 1) % self._rounds == 0 and not self._wait(), Metrics()


def main(folder: str, name: str, rounds: int) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    inputs, labels = problem()
    users = list(range(CLIENTS))
    parts = list(zip(inputs.split(EXAMPLES), labels.split(EXAMPLES), strict=True))
    data = FederatedDataset(
        lambda user: Dataset(raw_data=list(parts[user]), user_id=str(user)), get_user_sampler("random", users)
    )
    module = Network()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    gate = Gate(folder, name, pytorch_ops.distributed.global_rank == 0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=None
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=EXAMPLES),
        callbacks=[GateCallback(gate, rounds, module)],
        send_metrics_to_platform=False,
    )


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

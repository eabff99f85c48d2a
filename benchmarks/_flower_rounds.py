"""Rounds of Flower's simulation, for benchmarks/federated.py: run by the interpreter that has Flower."""

# Its peer is installed in another environment than the one in which types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportUnknownLambdaType=false, reportUntypedFunctionDecorator=false
from __future__ import annotations

import logging
import sys

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from _gate import CLIENTS, COHORT, EXAMPLES, RATE, Gate, network, problem

FOLDER, NAME, ROUNDS = sys.argv[1], sys.argv[2], int(sys.argv[3])
client_app, server_app = ClientApp(), ServerApp()
KEPT: dict[str, object] = {}
"""What an actor makes once: the data and the model."""


def kept() -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    if not KEPT:
        torch.set_num_threads(1)
        KEPT["all"] = (*problem(), network())
    return KEPT["all"]  # type: ignore[return-value]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    inputs, labels, model = kept()
    client = int(context.node_config["partition-id"])
    mine = slice(client * EXAMPLES, (client + 1) * EXAMPLES)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({"loss": float(loss), "num-examples": EXAMPLES})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class StopRoundsError(Exception):
    """Ends the rounds."""


@server_app.main()
def serve(grid: Grid, _: Context) -> None:
    gate, (inputs, labels, _) = Gate(FOLDER, NAME), kept()
    model = network()

    def wait(number: int, arrays: ArrayRecord) -> None:
        if number % ROUNDS:
            return
        with torch.no_grad():
            model.load_state_dict(arrays.to_torch_state_dict())
            loss = float(nn.functional.cross_entropy(model(inputs), labels))
        if not gate.wait(loss):
            raise StopRoundsError

    strategy = FedAvg(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    try:
        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=10**6, evaluate_fn=wait)
    except StopRoundsError:
        return


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server_app, client_app, CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )

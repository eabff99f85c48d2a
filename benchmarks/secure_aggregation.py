"""What secure aggregation costs: a client's traffic, the speed of masks, and how long the server takes to unmask.

Claims, for 100 clients with 1,000,000 parameters each, of which 10 % drop out after they have dealt shares: a client
sends and receives at most 1.75 times the bytes of its plain update (4 bytes a parameter); masks are made and added at
1 GB/s a core or more; and the server recovers all secrets and takes the masks off the sum in less than 10 s. With
quantize(8) an integer of the sum has 15 bits, so a client's traffic is at most half of its plain update.

The round is played by the machines of client and server, and its sum verified, before anything is timed. Traffic is
counted on the encoded messages of that round.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from offbeat.protocols.federated.secure.client import MaskWork
from offbeat.protocols.federated.secure.common_scale import CommonScale
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.plan import SecureEncoding, SecureRound
from offbeat.protocols.federated.secure.recovery import Unmasking
from offbeat.protocols.federated.secure.server import SecureSum, SecureTimes
from offbeat.protocols.machine import Name
from offbeat.simulate.faults.secure_rounds import Dropout, SecureWorld, fault_in
from offbeat.simulate.machines import Happening, Sent, Simulation
from offbeat.statistics import Spread, holds, spread

RESULTS = Path(__file__).parent / "results"
TRAFFIC = 1.75
QUANTIZED_TRAFFIC = 0.5
SPEED = 1.0
UNMASKING = 10.0
DROPPED = 0.1


def play(encoding: SecureEncoding, clients: int) -> tuple[MaskWork, Unmasking, Counter[Name], int]:
    """A verified round: the work of a client, that of the server, bytes by client, and how many were dropped."""
    plan = SecureRound.of(bytes(32), encoding, clients, signed=True)
    dropped = list(range(10, 10 + clients))[:: round(1 / DROPPED)]
    times = SecureTimes(phase=5.0, masks=5.0, repeat=100.0)  # So that nobody is asked twice.
    world = SecureWorld(plan, 1, dict.fromkeys(dropped, Dropout(2, before=True)), times)
    work: dict[type, Any] = {}
    traffic: Counter[Name] = Counter()

    def perform(each: Callable[[], Any]) -> Any:
        work[type(each)] = each
        return each()

    def log(happening: Happening) -> None:
        if isinstance(happening, Sent):
            nbytes = len(msgspec.msgpack.encode(happening.message)) + happening.nbytes
            traffic.update({happening.sender: nbytes, happening.to: nbytes})

    machines = world.machines
    simulation = Simulation(machines, perform={machine.name: perform for machine in machines}, log=log)
    simulation.run(1e5, lambda: world.server.outcome is not None)
    outcome = world.server.outcome
    assert isinstance(outcome, SecureSum), outcome
    assert len(outcome.clients) == clients - len(dropped)
    wrong = fault_in(machines)
    assert wrong is None, wrong
    stayed = Counter({f"client {client}": traffic[f"client {client}"] for client in outcome.clients})
    return work[MaskWork], work[Unmasking], stayed, len(dropped)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bar(name: str, found: Spread | float, **limit: float) -> dict[str, Any]:
    """One bar in the form that all our results have."""
    (key, value), *_ = limit.items()
    if isinstance(found, Spread):
        kept = holds(found, **limit)
        shown: Any = found.plain()
    else:
        kept, shown = (found <= value if key == "at_most" else found >= value), round(found, 4)
    return {"bar": name, key.replace("_", " "): value, "found": shown, "holds": bool(kept)}


def measured(mask: MaskWork, unmasking: Unmasking, blocks: int) -> tuple[list[float], list[float]]:
    """Gigabytes of masks per second, and seconds of the server, by block."""
    nbytes = (len(mask.adding) + len(mask.subtracting)) * mask.row.nbytes
    for work in (mask, unmasking):
        work()
    turns: Sequence[tuple[float, float]] = [(timed(mask), timed(unmasking)) for _ in range(blocks)]
    return [nbytes / own / 1e9 for own, _ in turns], [server for _, server in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "secure_aggregation.json")
    options = parser.parse_args()
    clients, parameters = options.clients, options.parameters
    plain = FixedPoint(length=parameters, clients=clients, examples=100)
    # As a run has it: the size of the update and its loss come on top, and keep their precision.
    few = CommonScale(length=parameters + 2, clients=clients, examples=100, bits=8, fine=2)
    bars, results = [], {}
    for name, encoding, most in (("", plain, TRAFFIC), ("quantize(8), ", few, QUANTIZED_TRAFFIC)):
        mask, unmasking, traffic, dropped = play(encoding, clients)
        speeds, seconds = measured(mask, unmasking, options.blocks)
        share = max(traffic.values()) / (4 * parameters)
        setup = f"{clients} clients x {parameters:,} parameters, {name}"
        bars += [
            bar(f"{setup}a client's traffic / plain update", share, at_most=most),
            bar(f"{setup}masks made and added, GB/s a core", spread(speeds), at_least=SPEED),
            bar(f"{setup}{dropped} dropped, seconds of the server's unmasking", spread(seconds), at_most=UNMASKING),
        ]
        figures = {"GB/s": speeds, "unmasking seconds": seconds, "bytes of a client": max(traffic.values())}
        results |= {name + key: value for key, value in figures.items()}
    for each in bars:
        print(json.dumps(each))
    stored = {
        "benchmark": "secure_aggregation",
        "holds": all(each["holds"] for each in bars),
        "environment": {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()},
        "bars": bars,
        "results": results,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not stored["holds"]:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

"""FedAvg on MNIST: rounds to 99 % accuracy on the test set, as in table 2 of McMahan et al. (2017).

Claims: with the paper's network of 1,663,370 parameters, 100 clients, C = 0.1, E = 5 and B = 10, the median of three
seeds needs at most 25 rounds if data is IID (the paper: 20), and at most 300 if each client has two shards of sorted
labels (229). The learning rate is the best of a grid, as in the paper.

Each (division, rate, seed) is a run of its own, whose rounds are kept in `--work`: a run that was interrupted goes on
from its last checkpoint, and one that is done is not repeated. So the table can be made in parts, by `--part`, `--rate`
and `--seed`. A call with `--store` writes the divisions whose runs are all done, and names the others as not measured.

    python benchmarks/fedavg_mnist.py --data DATA --part iid --rate 0.1 --seed 0     # one run
    python benchmarks/fedavg_mnist.py --data DATA                                    # what is missing, and the table
    python benchmarks/fedavg_mnist.py --data DATA --store                            # the table of what is done
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import offbeat
from offbeat.bench import environment
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.tasks.mnist import Mnist

RESULTS = Path(__file__).parent / "results"
PARTS = {"iid": ("iid", 25, 60), "non-IID": ("shards(2)", 300, 450)}
"""How data is divided, the bar, and the rounds after which a run counts as a miss."""
RATES = (0.05, 0.1, 0.2)
SEEDS = (0, 1, 2)
TARGET = 0.99
PARAMETERS = 1_663_370


@dataclass(eq=False)
class FedAvgMnist(offbeat.Task):
    """The paper's network on all 60,000 training images, scored on the test set after every round."""

    folder: str
    rate: float

    target = TARGET
    evaluate_every = 1
    evaluate_batch = 500
    score_by_parts = True

    def model(self) -> nn.Module:
        """Two convolutions of 5 by 5 with 32 and 64 channels, each with pooling, 512 units, and 10."""
        model = nn.Sequential(
            *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(7 * 7 * 64, 512), nn.ReLU(), nn.Linear(512, 10)),
        )
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS
        return model

    def data(self) -> offbeat.Data:
        """The usual division of MNIST; the paper has no validation set."""
        whole = Mnist(self.folder, held_out=1).data()
        train, test = _tensors(whole.train, whole.validation), _tensors(whole.test)
        few = TensorDataset(*(each[:500] for each in test.tensors))
        return offbeat.Data(train, test, few)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """Plain SGD."""
        return SGD(params, lr=self.rate)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(output, target)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """The share of images that are classified right."""
        return offbeat.accuracy(model, data)


def _tensors(*parts: Any) -> TensorDataset:
    """Images as numbers from 0 to 1, and labels, of parts one after the other."""
    images, labels = zip(*(part.tensors for part in parts), strict=True)
    return TensorDataset(torch.cat(images).float().div_(255), torch.cat(labels))


@dataclass(frozen=True)
class Trial:
    """One run: a division of the data, a learning rate and a seed."""

    part: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.part}-{self.rate:g}-{self.seed}"

    def kept(self, work: Path) -> dict[str, Any] | None:
        """Its result, if it is done."""
        path = work / self.name / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def learn(self, options: argparse.Namespace) -> dict[str, Any] | None:
        """Go on until 99 % is reached or the rounds are spent; None if it was stopped before by `--rounds`."""
        done = self.kept(options.work)
        if done is not None:
            return done
        data, _, most = PARTS[self.part]
        folder = options.work / self.name
        earlier = (folder / "latest").resolve()
        resume = earlier if (earlier / "checkpoint").is_dir() and any((earlier / "checkpoint").iterdir()) else None
        strategy = f"federated(clients=100, fraction=0.1, epochs=5, batch=10, data={data})"
        begun = len(read_rounds(resume)) if resume else 0
        steps = most if options.rounds is None else min(most, begun + options.rounds)
        start = time.perf_counter()
        result = offbeat.fit(
            *(FedAvgMnist(str(options.data), self.rate), strategy),
            workers=options.workers,
            steps=steps,
            seed=self.seed if resume is None else None,
            out=folder,
            resume=resume,
            checkpoint_every=5,
        )
        spent = time.perf_counter() - start
        print(f"{self.name}: {result.steps} rounds, {result.best_score}, {spent:.0f} s in this part", flush=True)
        if not result.reached_target and result.steps < most:
            return None
        done = {"rounds": result.steps if result.reached_target else None, "best": result.best_score}
        done |= {"rate": self.rate, "seed": self.seed, "seconds": result.seconds}
        (folder / "result.json").write_text(json.dumps(done, indent=1) + "\n")
        return done


def rounds_of(done: dict[str, Any]) -> float:
    """Rounds to the target; infinite for a miss."""
    return float("inf") if done["rounds"] is None else done["rounds"]


def row(part: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """A division's bar: the rates on the first seed, then the best of them on all; None while a run is missing."""
    bar = PARTS[part][1]

    def done(trial: Trial) -> dict[str, Any] | None:
        return trial.kept(options.work) if options.store else trial.learn(options)

    grid = [result for rate in RATES if (result := done(Trial(part, rate, SEEDS[0])))]
    if len(grid) < len(RATES):
        return None
    best = min(grid, key=rounds_of)
    runs = [result for seed in SEEDS if (result := done(Trial(part, best["rate"], seed)))]
    if len(runs) < len(SEEDS):
        return None
    middle = statistics.median(rounds_of(result) for result in runs)
    return {
        "bar": f"FedAvg on MNIST, {part}: rounds to 99 %, median of {len(SEEDS)} seeds",
        "found": None if middle == float("inf") else middle,
        "at most": bar,
        "holds": middle <= bar,
        "rate": best["rate"],
        "runs": runs,
        "other rates": [result for result in grid if result is not best],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with MNIST's four files")
    parser.add_argument("--work", type=Path, default=Path("fedavg_mnist"), help="the folder of the runs, kept")
    parser.add_argument("--part", choices=list(PARTS), help="only this division")
    parser.add_argument("--rate", type=float, action="append", help="only this learning rate; may be repeated")
    parser.add_argument("--seed", type=int, action="append", help="only this seed; may be repeated")
    parser.add_argument("--rounds", type=int, help="stop each run after so many more rounds")
    parser.add_argument("--store", action="store_true", help="run nothing; write the table of what is done")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "fedavg_mnist.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.part or options.rate or options.seed:
        parts = [options.part] if options.part else list(PARTS)
        for part, rate, seed in itertools.product(parts, options.rate or RATES, options.seed or SEEDS):
            print(f"{part}, rate {rate:g}, seed {seed}: {Trial(part, rate, seed).learn(options) or 'not done'}")
        return
    rows = {part: row(part, options) for part in PARTS}
    bars = [bar for bar in rows.values() if bar is not None]
    missing = [part for part, bar in rows.items() if bar is None]
    if missing and not options.store:
        sys.exit(f"not done: {', '.join(missing)}. Call it again to go on, or with --store to write the others")
    for bar in bars:
        print(f"{'holds ' if bar['holds'] else 'missed'} {bar['bar']}: {bar['found']} (rate {bar['rate']:g})")
    stored = {
        "benchmark": "fedavg_mnist",
        "holds": not missing and all(bar["holds"] for bar in bars),
        "environment": environment(),
        "bars": bars,
        "not measured": missing,
    }
    options.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()

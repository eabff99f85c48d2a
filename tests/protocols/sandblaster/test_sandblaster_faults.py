"""Sandblaster's machines in virtual time: the same bits whatever is lost, stopped or dead, and what that costs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from offbeat.protocols.machine import Payload
from offbeat.protocols.partition import share
from offbeat.protocols.sandblaster.lbfgs import Lbfgs
from offbeat.protocols.sandblaster.messages import MINIMIZER, PARAMETERS, shard_name
from offbeat.protocols.sandblaster.minimizer import Minimizer
from offbeat.protocols.sandblaster.shard import VectorShard
from offbeat.protocols.sandblaster.worker import Compute, Computed, PortionWorker, Ready, TakePart
from offbeat.protocols.servers.messages import worker_name
from offbeat.runtime.sandblaster.registers import Registers
from offbeat.simulate.machines import Kill, LossyNetwork, Simulation, Stop
from offbeat.simulate.sandblaster import evaluation_seconds

FEATURES, EXAMPLES, SHARDS = 6, 24, 2


class Run:
    """Workers, shards and coordinator in virtual time, on a small least-squares problem."""

    def __init__(
        self,
        *,
        workers: int = 3,
        portions: int = 6,
        iterations: int = 4,
        **simulated: Any,
    ) -> None:
        source = np.random.default_rng(1)
        self.inputs, self.wanted = source.normal(size=(EXAMPLES, FEATURES)), source.normal(size=EXAMPLES)
        self.portions, self.iterations = portions, iterations
        self.minimizer = Minimizer(Lbfgs(5), SHARDS, portions)
        self.workers = [PortionWorker(worker_name(n), SHARDS) for n in range(workers)]
        self.rows = [np.zeros(FEATURES) for _ in range(workers)]
        self.registers = [Registers() for _ in range(SHARDS)]
        self.ended = [0] * workers
        shards = [VectorShard(n) for n in range(SHARDS)]
        perform = {shard.name: registers.do for shard, registers in zip(shards, self.registers, strict=True)}
        for number, worker in enumerate(self.workers):
            perform[worker.name] = lambda work, number=number: self._work(number, work)
        self.simulation = Simulation(
            [self.minimizer, *shards, *self.workers], perform=perform, observer=MINIMIZER, **simulated
        )
        self.simulation.carry_out(worker_name(0), self.workers[0].load("float64", self._parts(np.zeros(FEATURES))))

    def _parts(self, row: np.ndarray) -> list[Payload]:
        parts = [row[slice(*share(FEATURES, shard, SHARDS))].copy() for shard in range(SHARDS)]
        return [Payload(part.nbytes, part) for part in parts]

    def _work(self, number: int, work: object) -> object:
        match work:
            case TakePart(shard, part):
                self.rows[number][slice(*share(FEATURES, shard, SHARDS))] = part.handle
            case Compute(_, portion):
                rows = slice(*share(EXAMPLES, portion, self.portions))
                error = self.inputs[rows] @ self.rows[number] - self.wanted[rows]
                gradient = self.inputs[rows].T @ error / EXAMPLES
                return Computed(float(error @ error) / 2 / EXAMPLES, self._parts(gradient))
            case Ready(None):
                for worker in self.workers:
                    self._iterate(worker)
            case Ready():
                self.ended[number] += 1
                if self.ended[number] < self.iterations:
                    self._iterate(self.workers[number])
            case _:
                pass
        return None

    def _iterate(self, worker: PortionWorker) -> None:
        """Begin the next iteration, after the event that is being handled."""
        at = self.simulation.now
        self.simulation._at(
            at, lambda: self.simulation.alive(worker.name) and self.simulation.carry_out(worker.name, worker.iterate())
        )

    def over(self) -> bool:
        return all(
            done >= self.iterations or not self.simulation.alive(worker.name)
            for worker, done in zip(self.workers, self.ended, strict=True)
        )

    def finish(self, seconds: float = 5000.0) -> np.ndarray:
        assert self.simulation.run(seconds, self.over), "the run has not ended"
        return np.concatenate([registers.row(PARAMETERS) for registers in self.registers])


UNDISTURBED = Run().finish()


def test_the_undisturbed_result_is_the_optimum() -> None:
    run = Run(iterations=12)
    result = run.finish()
    expected = np.linalg.lstsq(run.inputs, run.wanted, rcond=None)[0]
    np.testing.assert_allclose(result, expected, atol=1e-4)


@pytest.mark.parametrize("block", range(10))
def test_fifty_random_schedules_of_faults_give_the_same_bits(block: int) -> None:
    deaths = lost = 0
    for seed in range(50 * block, 50 * block + 50):
        draw = random.Random(seed)
        network = LossyNetwork(
            jitter=draw.choice([0.0, 0.002, 0.05]), loss=draw.choice([0.0, 0.1, 0.3]), duplicate=draw.choice([0.0, 0.3])
        )
        faults: list[Any] = [
            Kill(worker_name(n), draw.uniform(0.01, 0.3), seen_after=draw.uniform(0.0, 0.5))
            for n in draw.sample([1, 2], draw.choice([0, 1, 2]))
        ]
        names = [MINIMIZER, *map(shard_name, range(SHARDS)), *map(worker_name, range(3))]
        faults += [
            Stop(draw.choice(names), draw.uniform(0, 0.3), draw.uniform(0, 1.0)) for _ in range(draw.choice([0, 3]))
        ]
        run = Run(network=network, faults=faults, seed=seed)
        assert run.finish().tobytes() == UNDISTURBED.tobytes(), f"seed {seed}"
        deaths += sum(not run.simulation.alive(worker.name) for worker in run.workers)
        lost += run.simulation.lost
    assert deaths > 5
    assert lost > 50


def test_portions_of_a_dead_worker_are_handed_out_again() -> None:
    run = Run(workers=2, portions=8, faults=[Kill(worker_name(1), 0.0085, seen_after=0.1)])
    assert run.finish().tobytes() == Run(workers=2, portions=8).finish().tobytes()
    assert run.minimizer.handed_out[worker_name(1)] > 0


def test_a_worker_paused_two_fifths_of_the_time_costs_little_with_portions_and_much_without() -> None:
    paused, calm = (evaluation_seconds(4, 64, 4.0, paused=share) for share in (0.4, 0.0))
    assert 1.1 < paused / calm <= 1.15  # A tenth of the capacity is gone.
    paused, calm = (evaluation_seconds(4, 4, 4.0, paused=share, backups=False) for share in (0.4, 0.0))
    assert 1.6 < paused / calm < 1.7
    assert calm >= 1.0

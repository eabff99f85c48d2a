"""A new worker joins a run that others have begun: in the place of one that has died, and where the others are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fault_runs import (
    STEPS_OF_AN_EPOCH,
    Tally,
    applied,
    assert_nothing_is_left,
    batches_seen,
    parameters,
    seen_in_last_epoch,
)
from torch import nn

from offbeat.errors import OffbeatError, StrategyError
from offbeat.protocols.machine import Effect, Ended, Received, Send
from offbeat.protocols.servers.coordinator import CoordinatorMachine
from offbeat.protocols.servers.messages import ClusterView, Gone, JoinRequest, Leave, MeetingArrival, Met, Viewed
from offbeat.run.drive import Result, fit
from offbeat.run.job import Job, resolve
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal
from offbeat.task import reference_to

KILLED_AT = 6


@dataclass(eq=False)
class Awaiting(Tally):
    """Goes on until any worker of these, which were to die, has seen two epochs more than it had by then; or all."""

    ranks: tuple[int, ...] = (1,)
    every: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.score_by_parts = False

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        seen = [len(batches_seen(Path(self.folder), rank)) for rank in self.ranks]
        wanted = KILLED_AT + 2 * STEPS_OF_AN_EPOCH
        return float(min(seen) >= wanted if self.every else max(seen) >= wanted)


def replaced(
    launcher: Launcher,
    folder: Path,
    strategy: str,
    killed: Sequence[int] = (1,),
    replace: int = 1,
    awaited: tuple[int, ...] = (1,),
    every: bool = False,
) -> Result:
    """A run of three workers, some of which die early; it ends when one of the awaited has joined again, or all."""
    folder.mkdir(exist_ok=True)
    task = Awaiting(str(folder), awaited, every)
    disturb = [f"worker {rank}: kill at step {KILLED_AT}" for rank in killed]
    disturb += ["worker *: pace 1ms", "worker 1: stop 1ms at step 3"]
    learn = partial(fit, task, strategy, workers=3, target=1.0, epochs=100_000, seed=0, timeout=60.0)
    result = learn(out=folder / "runs", launcher=launcher, disturb=disturb, replace=replace)
    assert_nothing_is_left(result.run)
    assert result.disturbances == {"asked": len(killed) + 4, "fired": len(killed) + 4}
    return result


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["bsp", "ssp(2)", "asp"])
def test_a_new_worker_takes_the_place_of_a_dead_one(launcher: Launcher, tmp_path: Path, rule: str) -> None:
    result = replaced(launcher, tmp_path, f"server(consistency={rule})")
    assert (result.died, result.joined) == (["worker 1"], ["worker 1"])
    # Every example of the last epoch is seen once, a third of them by the new one.
    assert seen_in_last_epoch(tmp_path, range(3)) == sorted(range(48))
    assert all(len(batch) == 4 for batch in batches_seen(tmp_path, 1)[-STEPS_OF_AN_EPOCH:])
    (account,) = result.servers
    weight = parameters(result)["weight"]
    if rule == "bsp":
        assert (weight == result.steps).all()
    else:  # Each push moves the model by one over those who then took part.
        assert applied(account) / 3 - 1e-2 <= float(weight[0]) <= applied(account) / 2


@pytest.mark.slow
def test_the_first_worker_may_be_replaced_and_leads_again(launcher: Launcher, tmp_path: Path) -> None:
    result = replaced(launcher, tmp_path, "server(shards=2, replicas=1)", [0], awaited=(0,))
    assert (result.died, result.joined) == (["worker 0"], ["worker 0"])
    assert (parameters(result)["weight"] == result.steps).all()
    reported = [json.loads(line)["step"] for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert reported == sorted(set(reported))
    assert reported[-1] == result.steps


@pytest.mark.slow
def test_several_may_be_replaced_but_no_more_than_was_asked_for(launcher: Launcher, tmp_path: Path) -> None:
    both = replaced(launcher, tmp_path / "both", "server", [1, 2], replace=2, awaited=(1, 2), every=True)
    assert sorted(both.died) == sorted(both.joined) == ["worker 1", "worker 2"]
    one = replaced(launcher, tmp_path / "one", "server", [1, 2], replace=1, awaited=(1, 2))
    assert len(one.died) == 2
    assert len(one.joined) == 1


@pytest.mark.slow
def test_nobody_waits_to_join_a_run_that_nobody_is_left_of(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match=r"none was left|killed"):
        replaced(launcher, tmp_path, "server", [0, 1, 2], replace=9)


@pytest.mark.parametrize(("strategy", "words"), [("allreduce", "no worker can join"), ("ddp", "no worker can join")])
def test_strategies_whose_workers_cannot_join_refuse_to_replace(tmp_path: Path, strategy: str, words: str) -> None:
    job = Job(reference_to(Tally(str(tmp_path))), Goal(strategy=strategy, replace=1), workers=2)
    with pytest.raises(StrategyError, match=words):
        resolve(job)


# -- the coordinator's part, without a process -------------------------------------------------------------------------


def sent(effects: list[Effect] | tuple[Effect, ...], to: str) -> list[object]:
    """Messages among effects to somebody."""
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.to == to]


def coordinator_without(worker: int) -> CoordinatorMachine:
    """A coordinator of workers 0 to 2, of whom one has died."""
    machine = CoordinatorMachine(ClusterView.of(3, 1))
    machine.begin(0.0)
    machine.on(Ended(f"worker {worker}"), 0.0)
    return machine


def meet(machine: CoordinatorMachine, worker: int, what: str, admits: bool = False) -> list[Effect]:
    message = MeetingArrival(worker=worker, number=1, what=what, values=(7.0,), admits=admits)
    return list(machine.on(Received(f"worker {worker}", message), 0.0))


def test_one_who_waits_is_announced_to_all_alike_and_let_in_by_a_meeting_that_admits() -> None:
    machine = coordinator_without(1)
    assert sent(list(machine.on(Received("worker 1", JoinRequest(1, 99, patient=True)), 0.0)), "worker 1") == []
    assert machine.view.workers == (0, 2)
    meet(machine, 0, "a report")
    told = meet(machine, 2, "a report")
    for rank in (0, 2):
        (met,) = sent(told, f"worker {rank}")
        assert isinstance(met, Met)
        assert met.waiting == (1,)
    meet(machine, 0, "letting in", admits=True)
    assert machine.view.workers == (0, 2)
    told = meet(machine, 2, "letting in", admits=True)
    assert (machine.view.workers, machine.view.lives) == ((0, 1, 2), (0, 1, 0))
    (*_, viewed) = sent(told, "worker 1")
    assert isinstance(viewed, Viewed)
    assert (viewed.process, viewed.told) == (99, (7.0,))
    # Had that been lost, it would be told when it asks again; and it is let in once.
    (again,) = sent(list(machine.on(Received("worker 1", JoinRequest(1, 99, patient=True)), 0.0)), "worker 1")
    assert again == viewed


def test_one_who_dies_while_it_waits_is_not_let_in() -> None:
    machine = coordinator_without(1)
    machine.on(Received("worker 1", JoinRequest(1, 99, patient=True)), 0.0)
    machine.on(Ended("worker 1"), 0.0)
    for rank in (0, 2):
        meet(machine, rank, "letting in", admits=True)
    assert machine.view.workers == (0, 2)


def test_one_who_waits_is_sent_home_when_the_others_are_done() -> None:
    machine = coordinator_without(1)
    machine.on(Received("worker 1", JoinRequest(1, 99, patient=True)), 0.0)
    machine.on(Received("worker 0", Leave(0, 0)), 0.0)
    told = list(machine.on(Received("worker 2", Leave(2, 0)), 0.0))
    assert isinstance(sent(told, "worker 1")[-1], Gone)
    late = list(machine.on(Received("worker 1", JoinRequest(1, 99, patient=True)), 0.0))
    assert isinstance(sent(late, "worker 1")[-1], Gone)

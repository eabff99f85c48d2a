"""Schedules and machines of people's own: what is right holds, and what is wrong is found out by every means."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import paths
import pytest
from cli_support import Offbeat, in_process
from own_protocols import COURIER, STAR

from offbeat import protocols
from offbeat.errors import MachineError, ScheduleError, UsageError
from offbeat.protocols.collectives import ALGORITHMS, Algorithm, Collective, algorithm
from offbeat.protocols.gossip.machine import STEPPED, Gossiper, MoveHalfway
from offbeat.protocols.gossip.machine import CopyRow as ReadRow
from offbeat.protocols.gossip.topology import GraphShape, mixing
from offbeat.protocols.machine import NOTHING, Done, Effect, Event, Payload, SetTimer, Timer
from offbeat.protocols.schedule import Layout, Round, View
from offbeat.runtime.launch import Launcher
from offbeat.simulate.values import play_values
from offbeat.testing import MachineContract, check_machine, check_schedule
from offbeat.testing._schedules import REAL, Subject, bound, play_schedule, prove_schedule, run_schedule
from offbeat.user_protocols import OwnSchedule, find_own

SOURCES = Path(protocols.__file__).parent


@pytest.fixture
def offbeat(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    monkeypatch.setattr("offbeat.cli.commands.check.Launcher", lambda _preload: nullcontext(launcher))
    (tmp_path / "mine.py").write_text(STAR)
    return in_process(launcher, tmp_path, monkeypatch, capsys)


# -- numbers in virtual time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one", [a for named in ALGORITHMS.values() for a in named.values()], ids=lambda a: f"{a.collective}-{a.name}"
)
def test_every_bundled_schedule_ends_with_the_right_numbers_in_any_order(one: Algorithm) -> None:
    subject = Subject.of(one, one.collective, None)
    if one.collective is not Collective.BARRIER:
        assert play_schedule(subject) == 25


def test_a_play_is_repeated_by_its_seed_and_leaves_what_it_was_given_alone() -> None:
    naive, view, layout = algorithm(Collective.ALL_REDUCE, "star").schedule, View.of(4), Layout(5)
    given = [np.random.default_rng(rank).normal(size=5) for rank in range(4)]
    before = [one.copy() for one in given]
    first, again = (play_values(naive, view, layout, given, 3) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(given, before, strict=True))


def test_the_least_that_an_all_reduce_can_do_with() -> None:
    assert bound(Collective.ALL_REDUCE, 4, 100).port_bytes == 150
    assert bound(Collective.ALL_REDUCE, 5, 100).hops == 3
    assert bound(Collective.ALL_GATHER, 4, 100).port_bytes == 75
    assert bound(Collective.BROADCAST, 1, 100).port_bytes == 0


# -- a line changed ---------------------------------------------------------------------------------------------------

MUTANTS: dict[str, tuple[str, str, tuple[str, str], str]] = {
    "ring": ("phases", "window = slice(p - step - 1, 2 * p - step - 1)", (" - 1", ""), "reductions"),
    "halving_doubling": ("phases", "low = partner & -distance", ("partner", "mine"), "reductions"),
    "recursive_doubling": ("reductions", "exchange(at, Op.REDUCE, fold.kept, fold", ("REDUCE", "COPY"), "reductions"),
    "tree": ("phases", "exchange(at, Op.REDUCE, tree.ranks[sender]", ("REDUCE", "COPY"), "reductions"),
    "hierarchical": ("reductions", "tree_spread(at, hosts, layout.count)", ("count", "count // 2"), "reductions"),
}
"""By algorithm: the module and the line that is changed, what of it becomes what, and where the algorithm is."""


def mutated(name: str, folder: Path) -> OwnSchedule:
    """The algorithm from the bundled source, with one line changed."""
    where, line, change, home = MUTANTS[name]
    for module in ("phases", "reductions", "data_movement", "shared_memory"):
        text = (SOURCES / "collectives" / f"{module}.py").read_text()
        if module == where:
            assert text.count(line) == 1, f"{name}'s line is not there once: choose another"
            text = text.replace(line, line.replace(*change))
        text = text.replace(
            "from offbeat.protocols.collectives import phases", f"import mutant_{name}_phases as phases"
        )
        text = text.replace("offbeat.protocols.collectives.", f"mutant_{name}_")
        (folder / f"mutant_{name}_{module}.py").write_text(text)
    own = find_own(f"{folder}/mutant_{name}_{home}.py:{name}")
    assert isinstance(own, OwnSchedule)
    return own


def found_out(subject: Subject, launcher: Launcher) -> None:
    """The checker, the simulator and real processes each see that it is wrong."""
    with pytest.raises(ScheduleError, match="by the checker's proof"):
        prove_schedule(subject)
    with pytest.raises(ScheduleError, match=r"in virtual time \(seed \d"):
        play_schedule(subject)
    with pytest.raises(ScheduleError, match=r"for 4 ranks, on real processes: rank \d ends with"):
        run_schedule(subject, 4, launcher)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_line_fails_checker_simulator_and_real_run(name: str, tmp_path: Path, launcher: Launcher) -> None:
    found_out(Subject.of(mutated(name, tmp_path), Collective.ALL_REDUCE, None), launcher)


MIX = """\
from {module} import mix
from offbeat.protocols.gossip.topology import GraphShape, mixing

def my_mix(view, layout):
    return mix(mixing(GraphShape.{shape}, view.size).matrices[0])(view, layout)
"""


def mixed(module: str, shape: GraphShape, folder: Path) -> Subject:
    path = folder / f"mixes_{module.replace('.', '_')}_{shape}.py"
    path.write_text(MIX.format(module=module, shape=shape.name))
    own = find_own(f"{path}:my_mix")
    assert isinstance(own, OwnSchedule)
    return Subject.of(own, Collective.ALL_REDUCE, lambda size: mixing(shape, size).matrices[0])


@pytest.mark.slow
def test_a_changed_line_of_mixing_fails_checker_simulator_and_real_run(tmp_path: Path, launcher: Launcher) -> None:
    line = "heard.append(((target + shift) % size, target))"
    text = (SOURCES / "gossip" / "mixing.py").read_text()
    assert text.count(line) == 1
    (tmp_path / "mutant_mixing.py").write_text(text.replace(line, line.replace("shift)", "shift + 1)")))
    subject = mixed("mutant_mixing", GraphShape.EXPONENTIAL, tmp_path)
    found_out(subject, launcher)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [GraphShape.RING, GraphShape.EXPONENTIAL])
def test_mixing_as_it_is_holds_everywhere(shape: GraphShape, tmp_path: Path, launcher: Launcher) -> None:
    subject = mixed("offbeat.protocols.gossip.mixing", shape, tmp_path)
    own = OwnSchedule(subject.schedule, subject.collective, str(subject.source), subject.name)
    report = check_schedule(own, matrix=subject.matrix, launcher=launcher)
    assert (report.real, report.simulated, report.bounds) == (REAL, 25, {})


# -- schedules of one's own -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_right_schedule_holds_and_is_told_beside_the_least(offbeat: Offbeat) -> None:
    said = offbeat("check", "mine.py:my_star", "--format", "json")
    told = json.loads(said.out)
    assert said.code == 0
    assert (told["holds"], told["real"], told["not_run"]) == (True, [2, 3, 4], None)
    assert told["ranks"]["8"] == {
        "rounds": 4, "hops": 2, "least_hops": 3, "port_bytes": 7 * 17 * 4, "least_port_bytes": 2 * 7 / 8 * 17 * 4,
    }  # fmt: skip
    assert "running it on 4 processes" in said.err


def test_a_schedule_that_reads_memory_is_proved_and_played_but_not_run(offbeat: Offbeat) -> None:
    said = offbeat("check", "mine.py:FETCHED")
    assert said.code == 0
    assert "not run: it reads other ranks' memory" in said.out
    assert "as broadcast" in said.out


def test_a_wrong_schedule_fails_with_where_and_what(offbeat: Offbeat) -> None:
    said = offbeat("check", "mine.py:gathered", "--collective", "reduce_scatter")
    assert said.code == 1
    assert "gathered is wrong for 2 ranks, by the checker's proof: rank 0 ends with" in said.out
    told = json.loads(offbeat("check", "mine.py:gathered", "--format", "json").out)
    assert told["holds"] is False
    assert "contribution of" in told["wrong"]


def unfinished(view: View, layout: Layout) -> Iterator[Round]:
    raise ZeroDivisionError(view, layout)


def test_a_function_without_a_launcher_is_proved_and_played() -> None:
    report = check_schedule(algorithm(Collective.ALL_GATHER, "ring"))
    assert report.unrun == "no launcher was given"
    assert report.sizes[33].hops == 32
    with pytest.raises(ScheduleError, match="as it fails itself: ZeroDivisionError"):
        check_schedule(unfinished)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine.py:my_sta"], "Did you mean 'my_star'? Valid: FETCHED, gathered, my_star"),
        (["nothing.py:x"], "There is no file 'nothing.py'"),
        (["mine.py:NUMBER"], "neither a strategy nor a schedule nor a contract of machines: it is int."),
        (["mine.py:my_star", "--collective", "all_reduc"], "Did you mean 'all_reduce'?"),
        (["mine.py:my_star", "--workers", "3"], "--workers does not apply to a schedule"),
        (["allreduce", "--seed", "3"], "--seed does not apply to a strategy"),
    ],
)
def test_wrong_input_is_refused_with_the_nearest_names(offbeat: Offbeat, words: list[str], told: str) -> None:
    said = offbeat("check", *words)
    assert said.code == 2
    assert told in said.err


# -- machines of one's own --------------------------------------------------------------------------------------------


def test_machines_that_keep_their_contract_hold_under_faults(offbeat: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "couriers.py").write_text(COURIER)
    said = offbeat("check", "couriers.py:Deliveries", "--runs", "60", "--format", "json")
    told = json.loads(said.out)
    assert said.code == 0
    assert (told["holds"], told["runs"]) == (True, 60)
    assert told["lost"] > 0
    assert set(told["faults"]) == {"delay", "reorder", "loss", "duplicate", "stop", "partition"}
    assert all(count > 5 for count in told["faults"].values())
    assert offbeat("check", "couriers.py:Alone", "--runs", "3").code == 0, "a machine may say it by static methods"


@pytest.mark.parametrize(
    ("line", "other", "words"),
    [
        ("if event.message.number not in self.got:  # once", "if True:", "breaks its invariant"),
        ("return self.again() if self.missing else []", "return []", "is not done after"),
        ("self.missing.discard(", "self.missing.remove(", "raises KeyError"),
    ],
)
def test_a_machine_with_a_changed_line_is_found_out_and_found_again_by_its_seed(
    offbeat: Offbeat, tmp_path: Path, line: str, other: str, words: str
) -> None:
    assert COURIER.count(line) == 1
    (tmp_path / "spoiled_couriers.py").write_text(COURIER.replace(line, other))
    name = f"spoiled_couriers_{abs(hash(line))}.py"
    (tmp_path / "spoiled_couriers.py").rename(tmp_path / name)
    told = json.loads(offbeat("check", f"{name}:Deliveries", "--format", "json").out)
    assert not told["holds"]
    assert f"{name}:Deliveries {words}" in told["wrong"]
    assert f"--seed {told['seed']}`" in told["wrong"]
    assert "courier sends Parcel(number=" in told["wrong"] or "receives" in told["wrong"]
    again = offbeat("check", f"{name}:Deliveries", "--seed", str(told["seed"]))
    assert again.code == 1
    assert told["wrong"] in again.out


class Meetings(MachineContract):
    """Asynchronous gossip, bundled: no move is made by one side only, once all has come to rest."""

    survives = ("delay", "reorder", "loss", "duplicate", "stop")
    machine: Callable[..., Gossiper] = Gossiper

    def machines(self, size: int, seed: int) -> Sequence[Any]:
        made = mixing(GraphShape.COMPLETE, size)
        self.rows = {f"worker {rank}": float(rank) for rank in range(size)}
        self.mean = sum(self.rows.values()) / size
        return [
            _Worker(self.machine(f"worker {r}", [f"worker {k}" for k in made.neighbours(r)], seed + r, 0.2))
            for r in range(size)
        ]

    def perform(self, name: str, work: Any) -> Any:
        if isinstance(work, ReadRow):
            return Payload(8, self.rows[name])
        if isinstance(work, MoveHalfway):
            move = (work.row.handle - self.rows[name]) / 2
            self.rows[name] += move
            return Payload(8, move)
        if hasattr(work, "by"):
            self.rows[name] -= work.by.handle
        return NOTHING

    def invariant(self, machines: Any) -> str | None:
        return None

    def done(self, machines: Any) -> bool:
        still = all(worker.steps == 0 for worker in machines.values())
        return still and abs(sum(self.rows.values()) / len(self.rows) - self.mean) < 1e-9


class _Worker:
    """Steps ten times."""

    def __init__(self, machine: Gossiper) -> None:
        self.name, self.machine, self.steps = machine.name, machine, 10

    def begin(self, now: float) -> Sequence[Effect]:
        return [*self.machine.begin(now), SetTimer(0.1, "step")]

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        if event != Timer("step"):
            return self.machine.on(event, now)
        self.steps -= 1
        more = [SetTimer(0.1, "step")] if self.steps else []
        return [*self.machine.on(Done(STEPPED), now), *more]


def test_bundled_gossip_keeps_the_mean_and_with_a_changed_line_does_not() -> None:
    assert check_machine(Meetings(), 40).runs == 40

    class Forgetful(Gossiper):
        """Makes the move of a grant that comes twice, twice."""

        def on(self, event: Event, now: float) -> Sequence[Effect]:
            effects = super().on(event, now)
            return [*effects, *(one for one in effects if hasattr(getattr(one, "work", None), "by"))]

    broken = Meetings()
    broken.machine = Forgetful
    with pytest.raises(MachineError, match="Meetings is not done after"):
        check_machine(broken, 40)


def test_a_contract_with_unknown_faults_or_nameless_machines_is_refused() -> None:
    class Wrong(MachineContract):
        survives = ("los",)

    with pytest.raises(UsageError, match="Did you mean 'loss'"):
        check_machine(Wrong())

    class Twins(MachineContract):
        def machines(self, size: int, seed: int) -> Sequence[Any]:
            return [_Worker(Gossiper("twin", [], 0)) for _ in range(size)]

    with pytest.raises(UsageError, match="give each machine a unique name"):
        check_machine(Twins())


# -- as documented ----------------------------------------------------------------------------------------------------


def documented(word: str) -> str:
    """The program of docs/strategies.md that has this word."""
    page = (paths.ROOT / "docs/strategies.md").read_text()
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if word in block)


@pytest.mark.slow
def test_the_documented_schedule_holds_with_the_least_bytes(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text(documented("def my_ring"))
    own = find_own(f"{tmp_path}/ring.py:my_ring")
    assert isinstance(own, OwnSchedule)
    report = check_schedule(own, launcher=launcher)
    assert report.real == REAL
    # Blocks of 17 numbers on 8 ranks are 3 or 2 long: the busiest port carries little more than the least.
    assert report.sizes[8].port_bytes <= 1.1 * report.bounds[8].port_bytes
    assert documented("def my_ring").count("\n") <= 40


def test_the_documented_machines_hold_and_a_changed_line_is_found_out(tmp_path: Path) -> None:
    program = documented("class Deliveries")
    (tmp_path / "documented.py").write_text(program)
    contract = find_own(f"{tmp_path}/documented.py:Deliveries")
    assert isinstance(contract, MachineContract)
    assert check_machine(contract, 60).lost > 0
    line = "if event.message.number not in self.got:"
    assert program.count(line) == 1
    (tmp_path / "undocumented.py").write_text(program.replace(line, "if True:"))
    broken = find_own(f"{tmp_path}/undocumented.py:Deliveries")
    assert isinstance(broken, MachineContract)
    with pytest.raises(MachineError, match="got a parcel twice"):
        check_machine(broken, 60)

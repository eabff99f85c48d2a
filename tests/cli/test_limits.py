"""Numbers that no machine has room for are refused, with the limit, before anything starts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_support import Offbeat, in_process

import offbeat
from offbeat import limits
from offbeat.errors import DataError, OffbeatError, UsageError
from offbeat.league._settings import LeagueSettings
from offbeat.protocols import disturbances
from offbeat.run.job import Job, Script
from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.hosts import Host, Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.system import capacity
from offbeat.scaling import batch_size, scale
from offbeat.simulate.network import Link
from offbeat.simulate.servers.stragglers import Stragglers
from offbeat.simulate.units import parse_duration, parse_rate, parse_size
from offbeat.strategies import expand, parse

DIGITS = "offbeat.tasks.digits"
HUGE = 10**9


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (f"run {DIGITS} --workers {HUGE}", "1,024"),
        (f"run {DIGITS} --workers 100000", "1,024"),
        (f"run {DIGITS} --threads 100000", "1,024"),
        (f"run {DIGITS} --timeout 1e300", "366 days"),
        (f"run {DIGITS} --timeout inf", "seconds above 0"),
        (f"run {DIGITS} --steps {10**30}", "1,000,000,000,000,000"),
        (f"run {DIGITS} --epochs {10**16}", "1,000,000,000,000,000"),
        (f"run {DIGITS} --checkpoint-every {10**16}", "1,000,000,000,000,000"),
        (f"run {DIGITS} --seed {10**30}", "64 bits"),
        (f"run {DIGITS} --replace {HUGE} --strategy server", "10,000"),
        (f"run {DIGITS} --port {HUGE}", "65535"),
        (f"run {DIGITS} --strategy server(shards={HUGE})", "256"),
        (f"run {DIGITS} --strategy server(replicas={HUGE})", "256"),
        (f"compare {DIGITS} --workers {HUGE}", "1,024"),
        (f"compare {DIGITS} --seeds {HUGE}", "1,000"),
        (f"compare {DIGITS} --seed {2**63 - 2} --seeds 5", "64 bits"),
        (f"compare {DIGITS} --budget {HUGE}h", "366 days"),
        (f"compare {DIGITS} --budget 0s", "above 0"),
        (f"compare {DIGITS} --tune {','.join(map(str, range(1, 200)))}", "100"),
        (f"compare {DIGITS} --threads {HUGE}", "1,024"),
        (f"scale {DIGITS} --workers 1,{HUGE}", "1,024"),
        (f"scale {DIGITS} --repeats {HUGE}", "10,000"),
        (f"scale {DIGITS} --threads {HUGE}", "1,024"),
        (f"scale {DIGITS} --seconds nan", "above 0"),
        (f"batch-size {DIGITS} --workers {HUGE}", "1,024"),
        (f"batch-size {DIGITS} --times {HUGE}", "10,000"),
        (f"check allreduce --workers {HUGE}", "1,024"),
        (f"bench collectives --ranks {HUGE}", "1,024"),
        (f"bench collectives --blocks {HUGE}", "10,000"),
        ("bench collectives --size 1e30GB", "1 PiB"),
        ("bench collectives --ranks 2 --size 1024GB", "are free"),
        (f"bench collectives --simulate --network 1Gbit,1us --ranks {HUGE}", "65,536"),
        ("bench collectives --simulate --network 1Gbit,1us --size 1e30GB", "1 PiB"),
        ("bench collectives --simulate --network 1e30Gbit,1us", "bytes per second"),
        ("bench collectives --simulate --network 1Gbit,1e300s", "a year"),
        (f"bench server --simulate --workers {HUGE} --steps 1", "1,000,000"),
        (f"bench server --simulate --servers {HUGE} --network 1Gbit,1us --size 1MB", "10,000"),
        ("stop runs --within inf", "above 0"),
        (f"watch --port {HUGE}", "65535"),
    ],
)  # fmt: skip
def test_a_number_beyond_all_reason_is_refused_with_the_limit(offbeat_: Offbeat, words: str, limit: str) -> None:
    said = offbeat_(*words.split())
    assert (said.code, said.out) == (2, "")
    assert limit in said.err
    assert not Path("runs").exists()


def test_large_simulations_are_allowed() -> None:
    limits.whole("--ranks", 4096, limits.SIMULATED_RANKS)
    limits.whole("--workers", 10_000, limits.SIMULATED_WORKERS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: offbeat.fit(DIGITS, workers=HUGE),
        lambda: offbeat.fit(DIGITS, threads=HUGE),
        lambda: offbeat.fit(DIGITS, timeout=1e300),
        lambda: offbeat.fit(DIGITS, timeout=True),
        lambda: offbeat.fit(DIGITS, steps=10**30),
        lambda: offbeat.fit(DIGITS, seed=2**64),
        lambda: offbeat.compare(DIGITS, workers=HUGE),
        lambda: offbeat.compare(DIGITS, budget=1e300),
        lambda: offbeat.compare(DIGITS, seeds=HUGE),
        lambda: offbeat.init(seed=2**64),
        lambda: offbeat.init(timeout=timedelta.max),
        lambda: offbeat.init(timeout=timedelta(0)),
        lambda: scale(DIGITS, workers=[1, HUGE]),
        lambda: batch_size(DIGITS, times=HUGE),
        lambda: Job(Script("x.py"), Goal(), workers=HUGE),
        lambda: Job(Script("x.py"), Goal(), port=1 << 16),
        lambda: Goal(merge=HUGE),
        lambda: Goal(steps=-(10**5000)),
        lambda: Goal(timeout=10**400),
        lambda: Goal(timeout=-(10**5000)),
        lambda: Goal(rate_factor=10**400 * -1),
        lambda: Goal(rate_factor="2"),  # pyright: ignore[reportArgumentType]
        lambda: Goal.from_plain({"rate_factor": None}),
        lambda: Job(Script("x.py"), Goal(), port=10**5000),
        lambda: Link(10**400, -1.0),
        lambda: Stragglers.parse(f"pareto({10**400})"),
        lambda: Goal(gauge=-1),
        lambda: Goal.from_plain({"timeout": "soon"}),
        lambda: LeagueSettings({}, (), workers=HUGE),
        lambda: Host("a", workers=HUGE),
        lambda: Hosts(tuple(Host(f"h{i}", workers=1000) for i in range(2))),
        lambda: Hosts.alike(HUGE),
        lambda: where({"RANK": "0", "WORLD_SIZE": str(HUGE), "MASTER_ADDR": "a", "MASTER_PORT": "1"}),
        lambda: where({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": f"1(x{HUGE})"}),
        lambda: where({"SLURM_PROCID": "0", "SLURM_NTASKS": str(HUGE)}),
        lambda: disturbances.parse(f"worker 0: pause {10**12}s at step 1"),
        lambda: expand("local({1,2,3,4,5,6,7,8,9,10,11}) + accumulate({1,2,3,4,5,6,7,8,9,10,11}) + topk({.1,.2,.3,.4,"
                       ".5,.6,.7,.8,.9})"),
        lambda: parse("local(99999999999999999999999999)"),
        lambda: parse("server(consistency=deadline(1e300))"),
        lambda: parse("allreduce(bucket=1e300)"),
        lambda: parse("ddp(bucket=1e300)"),
        lambda: Parts(math.inf),
        lambda: parse_size("1e30GB"),
        lambda: parse_rate("1e30GB/s"),
        lambda: parse_duration("1e300s"),
    ],
)  # fmt: skip
def test_python_refuses_the_same(make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UsageError, DataError)):
        make()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"workers": HUGE}, {"threads": HUGE}, {"goal": {"timeout": 1e300}}])
def test_a_resumed_run_with_such_numbers_is_refused(offbeat_: Offbeat, tmp_path: Path, change: dict[str, Any]) -> None:
    config = {
        "what": {"task": {"source": DIGITS, "name": None, "arguments": {}}},
        "goal": {},
        "workers": 1,
        "threads": 1,
    }
    (tmp_path / "run/checkpoint/step-1").mkdir(parents=True)
    (tmp_path / "run/checkpoint/step-1/manifest.json").write_text("{}")
    (tmp_path / "run/run.json").write_text(json.dumps({"config": config | change, "state": "failed"}))
    said = offbeat_("run", "--resume", "run", "--format", "json")
    assert (said.code, "the limit" in json.loads(said.out)["error"]["message"]) == (2, True), said.err


def test_more_processes_than_the_machine_has_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda: 10 * capacity.MEMORY_OF_A_PROCESS)
    capacity.check_room(10, 1)
    with pytest.raises(UsageError, match=r"11 processes .* do not fit .* free memory, .* suffice for 10\."):
        capacity.check_room(11, 1)


def test_more_threads_than_the_kernel_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    threads_max = Path("/proc/sys/kernel/threads-max")
    monkeypatch.setattr(capacity, "_number", lambda path: 100 if path == threads_max else None)
    monkeypatch.setattr(capacity, "free_memory", lambda: None)
    capacity.check_room(4, 25)
    with pytest.raises(UsageError, match=r"5 processes with 25 threads .* 100 threads \(of the kernel\) suffice for 4"):
        capacity.check_room(5, 25)


def test_a_cgroup_with_less_memory_than_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    assert capacity.free_memory() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert (capacity.free_memory() or 0) > 10**6


def test_every_limit_says_what_it_is_for() -> None:
    source = Path(limits.__file__).read_text()
    for name in re.findall(r"^([A-Z_]+): Final", source, re.MULTILINE):
        assert re.search(rf'^{name}: Final = .*\n"""', source, re.MULTILINE), name


def test_a_refusal_is_an_error_of_ours() -> None:
    with pytest.raises(OffbeatError, match=r"of 5001 bits is more than 10, the limit"):
        limits.whole("it", 1 << 5000, 10)


@pytest.mark.parametrize(
    "wrong", [{"threads": HUGE}, {"steps": -1}, {"timeout": -1.0}, {"seeds": HUGE}, {"budget": 0.0}]
)
def test_a_league_refuses_numbers_before_it_starts_a_process(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a launcher was made")

    monkeypatch.setattr("offbeat.league._compare.Launcher", started)
    with pytest.raises(UsageError):
        offbeat.compare(DIGITS, **wrong)

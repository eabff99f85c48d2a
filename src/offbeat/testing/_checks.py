"""The contract of strategies, check by check (`offbeat check`, and our own tests).

Which checks a strategy must pass follows from its traits. Each is run on real processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from offbeat.errors import NonFiniteError, StrategyError, UsageError, WorkerError
from offbeat.run.drive import Result, fit
from offbeat.runtime.hosts import Hosts, abandoned, existing, made_here
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.runtime.run.procfs import stat_fields
from offbeat.runtime.state.checkpoint import newest
from offbeat.strategies import Combined, Strategy, Traits, combined
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.sandblaster import Sandblaster
from offbeat.strategies.worker.exchange import Timing
from offbeat.tasks.mixture import Mixture
from offbeat.testing._tasks import CurveTask, SplitCurveTask, curve

Failure = TypeVar("Failure", bound=Exception)
DEADLINE = 60.0  # Seconds that any wait of a check may take.
TOLERANCE = 1e-5  # How far an exact strategy may be from one process, in any parameter.
STEPS = 20  # Updates over which an exact strategy is compared.


@dataclass(frozen=True)
class Bench:
    """The strategy under check, and where to run it."""

    strategy: Combined
    workers: int
    launcher: Launcher
    folder: Path
    hosts: Hosts | None = None  # Hosts of the workers; None: this machine.

    def fit(self, where: str, **options: Any) -> Result:
        """Train on the contract's curve; arguments of `CurveTask` are recognized by name."""
        task, folder = self.task(where, options)
        known: dict[str, Any] = {"workers": self.workers, "out": folder / "runs", "launcher": self.launcher}
        if options.get("workers", self.workers) == self.workers:
            known["hosts"] = self.hosts
        return fit(task, options.pop("strategy", self.strategy), **(known | options))

    def task(self, where: str, options: dict[str, Any]) -> tuple[CurveTask, Path]:
        """The curve task, with its traces in a folder of that name."""
        folder = self.folder / where
        folder.mkdir(exist_ok=True)
        mine = {name: options.pop(name) for name in list(options) if name in CurveTask.__dataclass_fields__}
        return self.kind(str(folder), **mine), folder

    @property
    def kind(self) -> type[CurveTask]:
        """The task for what the strategy does to models."""
        return SplitCurveTask if self.strategy.split else CurveTask


@dataclass(frozen=True)
class Check:
    """One demand of the contract."""

    name: str  # A sentence.
    demanded: Callable[[Traits], bool]  # Whether strategies with these traits must pass it.
    run: Callable[[Bench], None]  # Raises AssertionError, with the reason, if it does not hold.


_CHECKS: list[Check] = []


def _check(
    name: str, demanded: Callable[[Traits], bool] = lambda _: True
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    def add(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        _CHECKS.append(Check(name, demanded, run))
        return run

    return add


def checks_for(strategy: Strategy) -> list[Check]:
    """The checks that this strategy's traits demand."""
    return [check for check in CHECKS if check.demanded(combined(strategy).traits)]


@contextmanager
def bench(strategy: Strategy, workers: int, launcher: Launcher, hosts: Hosts | None = None) -> Generator[Bench]:
    """An empty folder for one check."""
    with tempfile.TemporaryDirectory(prefix="offbeat-check-") as folder:
        yield Bench(combined(strategy), workers, launcher, Path(folder), hosts)


# -- demanded of all -------------------------------------------------------------------------------------------------


@_check("wrong parameters are refused before any process starts")
def wrong_parameters_are_refused_before_any_process_starts(bench: Bench) -> None:
    """No workers, or an argument that does not exist: an error, and not even a run folder."""
    for options in ({"workers": 0}, {"strategy": f"{bench.strategy.exchange.name}(no_such_argument=1)"}, {"steps": 0}):
        _failure(UsageError, partial(bench.fit, "refused", **options), f"{options} was accepted")
        _true(not (bench.folder / "refused" / "runs").exists(), "no run folder is made")


@_check("uneven parts finish and lose no example")
def uneven_parts_finish(bench: Bench) -> None:
    """37 examples in batches of 8 over the workers: nothing hangs, nothing is lost; skewed and empty parts too."""
    for parts in ("iid", "dirichlet(0.1)"):
        result = bench.fit(f"uneven-{parts[:3]}", epochs=2, parts=parts)
        _equal(_samples(bench, result, 2 * 37), 2 * 37, f"examples seen in two epochs with {parts} parts")
        _equal(result.epochs, 2, "epochs")
    result = bench.fit("uneven-one", epochs=1, batch=1, examples=5)
    _equal(_samples(bench, result, 5), 5, "examples seen in batches of one, which leave the other workers without")


@_check("bytes and times are accounted")
def bytes_and_times_are_accounted(bench: Bench) -> None:
    """Kinds of time sum to the whole, and what was sent is counted."""
    result = bench.fit("accounted", epochs=3)
    total = sum(result.seconds_by_kind.values())
    _true(abs(total - result.seconds) <= 1e-6 * max(total, 1), f"kinds sum to {total}, seconds are {result.seconds}")
    kinds = {"input", "compute", "communicate", "wait", "evaluate", "other"}
    _true(set(result.seconds_by_kind) - {"bubble"} == kinds, "kinds of time")
    _true(result.core_seconds > 0 and result.seconds > 0, "time was spent")
    _true((result.bytes_sent > 0) == (bench.workers > 1), f"{result.bytes_sent} bytes sent by {bench.workers} workers")
    _true(result.steps > 0 and result.score is not None, "steps and score are there")


@_check("success leaves nothing behind")
def success_leaves_nothing(bench: Bench) -> None:
    """After a run no process, listening port or shared-memory segment is left."""
    before = traces()
    bench.fit("success", epochs=1)
    nothing_left(bench.folder / "success", before, bench.launcher)


@_check("a crash is named and leaves nothing behind")
def a_crash_is_named_and_leaves_nothing(bench: Bench) -> None:
    """An exception on the last worker ends the run with its role, rank and traceback."""
    error = _blamed(bench, "raise", "had raised")
    _in("this failure was asked for", str(error), "the message")
    _in("ArithmeticError", error.remote_traceback, "the traceback")


@_check("a killed worker is named and leaves nothing behind", lambda t: not t.elastic)
def a_killed_worker_is_named_and_leaves_nothing(bench: Bench) -> None:
    """A worker killed by the system ends the run of a strategy that is not elastic, and is named."""
    _in("SIGKILL", str(_blamed(bench, "kill", "was killed")), "the message")


def _blamed(bench: Bench, fault: str, how: str) -> WorkerError:
    """The error of a run whose last worker fails: it names that worker, and nothing is left behind."""
    before, last = traces(), bench.workers - 1
    run = partial(bench.fit, fault, epochs=3, fault=fault, fault_rank=last)
    error = _failure(WorkerError, run, f"the run went on although a worker {how}")
    _equal((error.role, error.rank), ("worker", last), "who is blamed")
    nothing_left(bench.folder / fault, before, bench.launcher)
    return error


@_check("Ctrl-C leaves nothing behind")
def ctrl_c_leaves_nothing(bench: Bench) -> None:
    """SIGINT to `offbeat run` in mid-run ends everything within seconds."""
    before = traces()
    task, folder = bench.task("interrupted", {"pause": 0.05})
    command = [sys.executable, "-m", "offbeat", "run", f"offbeat.testing._tasks:{bench.kind.__name__}"]
    command += ["--workers", str(bench.workers)]
    if bench.hosts is not None:
        (folder / "hosts.toml").write_text(bench.hosts.text())
        command += ["--hosts", str(folder / "hosts.toml")]
    command += ["--strategy", str(bench.strategy), "--epochs", "10000", "--out", str(folder / "runs")]
    command += ["--", "--folder", task.folder, "--pause", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder) as process:
        try:
            _until(lambda: (folder / "replica-0").exists(), "the first step of the run")
            process.send_signal(signal.SIGINT)
            _equal(process.wait(DEADLINE), 130, "exit code after Ctrl-C")
        finally:
            process.kill()
    nothing_left(folder, before)


@_check("a loss that is not finite stops the run", lambda t: not t.refuses_updates)
def a_loss_that_is_not_finite_stops_the_run(bench: Bench) -> None:
    """NaN on one worker: the run stops and says where; the last checkpoint stays."""
    # Under sandblaster a step is many losses, of which each worker computes some.
    losses = 6 if isinstance(bench.strategy.exchange, Sandblaster) else 1
    options = {
        "fault": "nan",
        "fault_rank": 0,
        "fault_step": 8 * losses,
        "batch": 8,
        "examples": 16,
        "checkpoint_every": 2,
    }
    train = partial(bench.fit, "nan", epochs=40, **options)
    error = _failure(NonFiniteError, train, "the run went on with a loss of NaN")
    # Where workers share a replica, all see its loss, and any may be the first.
    _in("worker " if bench.strategy.split else "worker 0", str(error), "the message")
    _in("step", str(error), "the message")
    run = next((bench.folder / "nan" / "runs").resolve().glob("2*"))
    _true(newest(run / "checkpoint") is not None, "the checkpoint from before is kept")


@_check("an update that is not finite is refused, and the run goes on", lambda t: t.refuses_updates)
def an_update_that_is_not_finite_is_refused(bench: Bench) -> None:
    """NaN in one client's loss: its update is counted as refused, and the model stays finite."""
    result = bench.fit("nan", epochs=2, fault="nan", fault_rank=0, fault_step=2)
    _true(result.federated.get("refused", 0) > 0, f"refused updates are counted: {result.federated}")
    _true(all(bool(value.isfinite().all()) for value in _trained(result).values()), "parameters are finite")


@_check("a watched run goes on from its checkpoints")
def a_watched_run_goes_on_from_its_checkpoints(bench: Bench) -> None:
    """With events recorded and a checkpoint every third step, a run ends, and goes on when it is resumed."""
    cut = bench.fit("watched", steps=7, watch=True, checkpoint_every=3)
    resumed = bench.fit("watched", steps=12, watch=True, checkpoint_every=3, resume=cut.run)
    _true(resumed.steps >= 12, f"{resumed.steps} steps after a resumed run of 12")
    _true(all(bool(value.isfinite().all()) for value in _trained(resumed).values()), "parameters are finite")


# -- demanded by traits ----------------------------------------------------------------------------------------------


@_check("exact: workers equal one process on the joined batch", lambda t: t.exact)
def workers_equal_one_process(bench: Bench) -> None:
    """20 updates of SGD on uneven parts equal a plain PyTorch loop on the joined batch."""
    expected = plain_loop(STEPS, 37)
    batch = -(-37 // _batches_per_update(bench))  # One update sees all examples.
    for workers in sorted({1, bench.workers} if _allows(bench, 1) else {bench.workers}):
        trained = _trained(bench.fit(f"exact-{workers}", epochs=STEPS, batch=batch, workers=workers))
        _close(trained, expected, f"{workers} workers against a plain loop")


@_check("exact: the order of data is independent of workers", lambda t: t.exact)
def the_order_of_data_is_independent_of_workers(bench: Bench) -> None:
    """Minibatches in shuffled order: any number of workers gives what one gives."""
    when = "" if bench.strategy.when is None else f" + {bench.strategy.when}"
    one = _trained(bench.fit("order-1", epochs=3, workers=1, strategy=f"single{when}"))
    many = _trained(bench.fit("order-n", epochs=3))
    _close(many, one, f"{bench.workers} workers against one")


@_check("exact: statistics are summed over workers", lambda t: t.exact)
def statistics_are_summed_over_workers(bench: Bench) -> None:
    """Expectation-maximization on several workers equals one."""
    options: dict[str, Any] = {"steps": 5, "launcher": bench.launcher, "out": bench.folder / "em", "target": 1e9}
    one = _trained(fit(Mixture(), "single", workers=1, **options))
    many = _trained(fit(Mixture(), bench.strategy.exchange, workers=bench.workers, hosts=bench.hosts, **options))
    _close(many, one, "EM over workers against one")


@_check("deterministic: the same seed gives the same bits", lambda t: t.deterministic)
def the_same_seed_gives_the_same_bits(bench: Bench) -> None:
    """Two runs end with identical parameters; another seed does not."""
    first, second = (_trained(bench.fit(f"seed-{i}", epochs=2, seed=5)) for i in range(2))
    other = _trained(bench.fit("seed-other", epochs=2, seed=6))
    _true(all(torch.equal(first[name], second[name]) for name in first), "same seed, same bits")
    _true(any(not torch.equal(first[name], other[name]) for name in first), "another seed, another model")


@_check("deterministic: a resumed run gives the same bits", lambda t: t.deterministic)
def a_resumed_run_gives_the_same_bits(bench: Bench) -> None:
    """A run cut in the middle of an epoch and resumed ends like one that was never cut."""
    whole = _trained(bench.fit("whole", steps=11, seed=5))
    cut = bench.fit("cut", steps=7, seed=5)
    resumed = _trained(bench.fit("cut", steps=11, resume=cut.run))
    same = all(torch.equal(whole[name], resumed[name]) for name in whole)
    _true(same, "resumed and uninterrupted runs are bit for bit equal")


@_check(
    "synchronous: replicas are identical after an exchange",
    lambda t: t.synchronous and not t.splits_model,  # Otherwise a worker has no replica of its own.
)
def replicas_are_identical_after_an_exchange(bench: Bench) -> None:
    """At the start of every step after an exchange all workers hold the same bits."""
    every = _batches_per_update(bench)
    bench.fit("replicas", epochs=2, batch=4, examples=4 * every * 3)
    seen = [(bench.folder / "replicas" / f"replica-{rank}").read_text().split() for rank in range(bench.workers)]
    _equal(len({len(lines) for lines in seen}), 1, "different numbers of steps")
    _true(all(lines[::every] == seen[0][::every] for lines in seen), "replicas differ after an exchange")
    _true(len(set(seen[0])) > 3, "the model moved")


CHECKS: tuple[Check, ...] = tuple(_CHECKS)


# -- the yardsticks --------------------------------------------------------------------------------------------------


def plain_loop(steps: int, examples: int) -> dict[str, Tensor]:
    """The parameters after `steps` steps of plain PyTorch on the whole batch of the curve, without offbeat."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, target = curve(examples)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    return dict(model.state_dict())


def traces() -> set[str]:
    """What a run could leave: shared memory of this user, this process's listening ports, abandoned network namespaces.

    A port of another process goes with that process; other activity on this machine does not matter.
    """
    shared = Path("/dev/shm")  # noqa: S108
    entries = [entry for entry in shared.iterdir() if _owned(entry)] if shared.exists() else []
    found = {f"segment {entry.name}" for entry in entries}
    mine = _sockets()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            words = line.split()
            if words[3] == "0A" and words[9] in mine:  # 0A: listening.
                found.add(f"listening {words[1]}")
    return found | {f"network namespace {name}" for name in existing() if made_here(name) or abandoned(name)}


def _owned(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False  # It is gone by now.


def _sockets() -> set[str]:
    found: set[str] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            kind, _, number = str(descriptor.readlink()).partition(":[")
        except OSError:
            continue  # The listing's own descriptor.
        if kind == "socket":
            found.add(number.rstrip("]"))
    return found


def nothing_left(folder: Path, before: set[str], launcher: Launcher | None = None) -> None:
    """Wait until no process of the run is alive and its segments and ports are gone; else report what is left.

    With the launcher, processes that have left their worker's group are found too: its fork server inherits them.
    """
    workers = [int(line) for file in folder.glob("pid-*") for line in file.read_text().split()]
    _true(len(workers) > 0, "the run never started")
    server = launcher.server_pid if launcher else None
    _until(lambda: not _alive(workers, server), lambda: f"the end of processes {_alive(workers, server)}")
    _until(lambda: traces() <= before, lambda: f"the end of {sorted(traces() - before)}")


def _alive(groups: list[int], parent: int | None) -> list[int]:
    """Processes that belong to one of these process groups or are children of the parent, zombies aside."""
    found: list[int] = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        state, parent_of, group, *_ = stat_fields(pid) or ("Z", "0", "0")
        if state != "Z" and (int(group) in groups or pid in groups or int(parent_of) == parent):
            found.append(pid)
    return found


def _until(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {DEADLINE:g} s in vain for {what if isinstance(what, str) else what()}")
        time.sleep(0.02)


def _failure(kind: type[Failure], run: Callable[[], object], otherwise: str) -> Failure:
    """The error of this kind that a run ends with."""
    try:
        run()
    except kind as error:
        return error
    raise AssertionError(otherwise)


def _trained(result: Result) -> dict[str, Tensor]:
    return load_file(result.run / MODEL_FILE)


def _batches_per_update(bench: Bench) -> int:
    when = bench.strategy.when
    return when.batches_per_update() if isinstance(when, Timing) else 1


def _samples(bench: Bench, result: Result, expected: int) -> int:
    """Examples seen; as many as expected if it is left to chance or a line search how many."""
    exchange = bench.strategy.exchange
    drawn = isinstance(exchange, Federated) and (exchange.fraction < 1 or exchange.algorithm.buffer is not None)
    searched = isinstance(exchange, Sandblaster) and result.samples % expected in (0, expected // 2)
    return expected if (drawn or searched) and result.samples > 0 else result.samples


def _allows(bench: Bench, workers: int) -> bool:
    try:
        bench.strategy.check(workers)
    except StrategyError:
        return False
    return True


def _close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    _equal(sorted(found), sorted(expected), "the names of parameters")
    furthest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    _true(furthest <= TOLERANCE, f"{what}: parameters differ by {furthest:.2g}, more than {TOLERANCE:g}")


def _equal(found: object, expected: object, what: str) -> None:
    _true(found == expected, f"{what}: {found!r} instead of {expected!r}")


def _in(part: str, text: str, what: str) -> None:
    _true(part in text, f"{what} lacks {part!r}: {text[-500:]}")


def _true(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)

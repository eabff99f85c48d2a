"""State that survives: trees of tensors and text, optimizers and schedulers, checkpoints on the disk."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.optim import lr_scheduler, swa_utils

from offbeat.errors import CheckpointError
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.rank_environment import Place
from offbeat.runtime.state import checkpoint
from offbeat.runtime.state.checkpoint import Checkpoints, newest, read_manifest
from offbeat.runtime.state.checkpoint_manager import Holdings
from offbeat.runtime.state.tensor_tree import put_together, take_apart

IDENTITY = {"task": "digits", "shape": (2, 3)}


def _checkpoints(folder: Path, **identity: Any) -> Checkpoints:
    group = DirectGroup(Place(), timedelta(seconds=1), torch.device("cpu"))
    return Checkpoints(folder, group, IDENTITY | identity)


def _save(folder: Path, step: int, value: float = 0.0) -> Path:
    state = {"weights": torch.full((8,), value), "step": step}
    return _checkpoints(folder).save(step, state, {"own": [value]}, {"score": value, "by step": {9: 1, 10: 2}})


def _loaded(folder: Path) -> tuple[int, float]:
    """The step and value of what can be loaded, after seeing that all of it belongs together."""
    shared, own, summary = _checkpoints(folder).load()
    assert shared["weights"].tolist() == own["own"] * 8 == [summary["score"]] * 8
    return shared["step"], summary["score"]


def _round_trip(value: Any) -> Any:
    tensors: dict[str, Any] = {}
    text = json.dumps(take_apart(value, "state", tensors))
    return put_together(json.loads(text), tensors)


# -- trees -----------------------------------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
nested = st.recursive(
    plain | st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(nested)
def test_nested_data_comes_back_as_it_was(value: Any) -> None:
    back = _round_trip(value)
    assert repr(back) == repr(value)
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        Counter({30: 1, 80: 2}),
        OrderedDict(b=1, a=2),
        deque([1, 2], maxlen=2),
        {1, 2},
        frozenset({3}),
        [({"x": Counter(a=1)}, deque([{4}]))],
        {"~tensor": 1, "~pairs": [], "~tuple": {"~deque": ()}},
        {1: torch.tensor(1), "1": torch.tensor(2), "a.b": torch.tensor(3), "a": {"b": torch.tensor(4)}},
        np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1],
        np.broadcast_to(np.int64(3), (2, 2)),
    ],
)
def test_containers_and_arrays_keep_their_kind(value: Any) -> None:
    back = _round_trip(value)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_numpy_numbers_become_plain_ones() -> None:
    assert _round_trip([np.float32(0.5), np.int8(3), np.bool_(True)]) == [0.5, 3, True]


NUMBERS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 uint32 uint16 uint8"


@pytest.mark.parametrize("name", [*NUMBERS.split(), "bool", "complex64"])
def test_tensors_of_every_common_type_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    tensor = torch.tensor([0, 1] * 8, dtype=torch.uint8).view(getattr(torch, name))
    saved = _checkpoints(tmp_path)
    saved.save(1, {"x": tensor}, {}, {})
    back = saved.load()[0]["x"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_scalars_empty_tied_strided_and_expanded_tensors_come_back(tmp_path: Path) -> None:
    base = torch.arange(12.0, requires_grad=True)
    state = {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "tied": [base, base],
        "view": base.detach()[2:5],
        "strided": base.detach().view(3, 4).t(),
        "expanded": torch.ones(1).expand(5),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    saved = _checkpoints(tmp_path)
    saved.save(1, state, {}, {})
    back = saved.load()[0]
    assert repr(back) == repr({k: [base.detach()] * 2 if k == "tied" else v for k, v in state.items()}).replace(
        "Parameter containing:\ntensor([1., 1.], requires_grad=True)", "tensor([1., 1.])"
    )


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (1j, "complex"),
        (lambda: 0, "function"),
        (b"x", "bytes"),
        (np.longdouble(1), "longdouble"),
        (np.datetime64("2026-01-01"), "date"),
        (np.array(["a"]), "array"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(1, dtype=torch.complex128), "complex128"),
        (torch.zeros(1, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_path(value: Any, kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"state\.deep\.1\.x is a.*{kind}"):
        _round_trip({"deep": [0, {"x": value}]})
    _save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"worker 0.*state\.deep.*step-000000001, is intact"):
        _checkpoints(tmp_path).save(2, {}, {"deep": value}, {})
    assert _loaded(tmp_path) == (1, 0.0)


# -- optimizers and schedulers ---------------------------------------------------------------------------------------

OPTIMIZERS = sorted(
    {kind for kind in vars(optim).values() if inspect.isclass(kind) and issubclass(kind, optim.Optimizer)}
    - {optim.Optimizer},
    key=lambda kind: kind.__name__,
)


def _train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> list[Any]:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((model(inputs) - inputs.float().sum()) ** 2).mean()
        loss.backward()
        return loss

    losses: list[Any] = []
    for step in steps:
        inputs = torch.tensor([step % 3, 1]) if isinstance(model, nn.Embedding) else torch.ones(2, 3) * step
        losses.append(optimizer.step(closure).item())
    return losses


def _held(kind: Any) -> Holdings:
    torch.manual_seed(0)
    model = nn.Embedding(3, 3, sparse=True) if kind is optim.SparseAdam else nn.Linear(3, 3, bias=False)
    held = Holdings()
    extra = {"momentum": 0.9} if kind in (optim.SGD, optim.RMSprop) else {}
    held.models, held.optimizers = [model], [kind(model.parameters(), lr=0.01, **extra)]
    return held


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_from_a_checkpoint_as_if_nothing_had_been(kind: Any, tmp_path: Path) -> None:
    held, fresh = _held(kind), _held(kind)
    _train(held.models[0], held.optimizers[0], range(4))
    saved = _checkpoints(tmp_path)
    saved.save(4, held.replicas(), {}, {})
    fresh.load_replicas(saved.load()[0], range(1), range(1))
    expected = _train(held.models[0], held.optimizers[0], range(4, 9))
    assert _train(fresh.models[0], fresh.optimizers[0], range(4, 9)) == expected
    assert torch.equal(*(h.models[0].weight for h in (held, fresh)))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 7, 7, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 7),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.StepLR(o, 2), lr_scheduler.StepLR(o, 3), lr_scheduler.MultiStepLR(o, [2, 4])], [4, 8]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.MultiStepLR(o, [2, 9])]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.5, anneal_epochs=9),
}


def _rates(held: Holdings, scheduler: Any, steps: range) -> list[float]:
    rates: list[float] = []
    for step in steps:
        held.optimizers[0].step()
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0 if step < 4 else 2.0] if plateau else []))
        rates += [float(group[name]) for group in held.optimizers[0].param_groups for name in ("lr", "momentum")]
    return rates


def _scheduled(name: str) -> tuple[Holdings, Any]:
    held = _held(optim.SGD)
    return held, SCHEDULERS[name](held.optimizers[0])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_is_found_and_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    (held, scheduler), (fresh, other) = _scheduled(name), _scheduled(name)
    _rates(held, scheduler, range(6))
    for each in (held, fresh):
        each.find_schedulers()
        each.find_schedulers()
    assert [type(found).__name__ for found in held.others] == [name], "found once, without its inner ones"
    saved = _checkpoints(tmp_path)
    saved.save(6, held.replicas() | {"others": held.other_states()}, {}, {})
    state = saved.load()[0]
    fresh.load_replicas(state, range(1), range(1))
    fresh.load_others(state["others"])
    expected = _rates(held, scheduler, range(6, 18))
    assert _rates(fresh, other, range(6, 18)) == expected
    assert len(set(expected)) > 2 or name == "ConstantLR"


def test_all_of_torchs_schedulers_are_among_those_tested() -> None:
    kinds = [kind for kind in vars(lr_scheduler).values() if inspect.isclass(kind)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, lr_scheduler.LRScheduler)}
    assert names - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


def test_schedulers_of_one_class_go_back_to_their_own_optimizers() -> None:
    def pair(backwards: bool) -> Holdings:
        held = Holdings()
        held.optimizers = [_held(optim.SGD).optimizers[0] for _ in range(2)]
        made = [lr_scheduler.StepLR(o, 3 + i) for i, o in enumerate(held.optimizers) if not backwards]
        if backwards:
            made = [lr_scheduler.StepLR(o, 3 + i) for i, o in reversed([*enumerate(held.optimizers)])]
        held.find_schedulers()
        assert len(held.others) == len(made)
        return held

    states = _round_trip(pair(backwards=True).other_states())
    fresh = pair(backwards=False)
    fresh.load_others(states)
    assert [(found.optimizer, found.step_size) for found in fresh.others] == [
        (optimizer, 3 + i) for i, optimizer in enumerate(fresh.optimizers)
    ]


class Keeper:
    """Something of a user's own, with a state."""

    def __init__(self) -> None:
        self.counts: Any = defaultdict(int)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


def test_others_come_back_with_their_containers() -> None:
    held, fresh = Holdings(), Holdings()
    held.others, fresh.others = [Keeper()], [Keeper()]
    held.others[0].counts["x"] += 2
    fresh.load_others(_round_trip(held.other_states()))
    fresh.others[0].counts["new"] += 1
    assert dict(fresh.others[0].counts) == {"x": 2, "new": 1}


def test_state_that_does_not_fit_is_refused() -> None:
    held, other = _held(optim.SGD), _held(optim.SGD)
    state = held.replicas() | {"buffers": held.buffers()}
    other.models = [nn.Linear(2, 2), nn.Linear(3, 3, bias=False)]
    with pytest.raises(CheckpointError, match=r"model does not fit this one: [\s\S]*size mismatch"):
        other.load_replicas(state, range(1), ())
    other.optimizers = [optim.SGD(nn.Linear(2, 2).parameters())]
    with pytest.raises(CheckpointError, match="optimizer does not fit this one"):
        other.load_replicas(state, (), range(1))
    with pytest.raises(CheckpointError, match="holds 1 models, this run has more"):
        other.load_replicas(state, range(1, 2), ())
    other.models = [nn.BatchNorm1d(2)]
    with pytest.raises(CheckpointError, match="buffers do not fit"):
        other.load_buffers(state["buffers"])
    other.others = [Keeper()]
    with pytest.raises(CheckpointError, match="holds no state for a Keeper"):
        other.load_others([])


def test_buffers_come_back() -> None:
    held, fresh = Holdings(), Holdings()
    held.models, fresh.models = [nn.BatchNorm1d(2)], [nn.BatchNorm1d(2)]
    held.models[0](torch.rand(5, 2))
    fresh.load_buffers(_round_trip(held.buffers()))
    assert torch.equal(held.models[0].running_var, fresh.models[0].running_var)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_loaded_and_older_ones_are_gone(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    for step in (3, 20, 1_234_567_890_123):
        path = _save(tmp_path, step, step % 4)
        assert newest(tmp_path) == path
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        assert _loaded(tmp_path) == (step, step % 4)


def test_what_a_kill_has_left_is_swept_up(tmp_path: Path) -> None:
    (tmp_path / ".draft-000000007").mkdir()
    (tmp_path / ".gone-step-000000002-abcd1234").mkdir()
    (tmp_path / "step-000000001").mkdir()
    (tmp_path / "step-notes").mkdir()
    path = _save(tmp_path, 8)
    assert {found.name for found in tmp_path.iterdir()} == {path.name, "step-notes"}


def _seen(path: Path) -> set[str] | None:
    """The files of a checkpoint that is found under its name before they are read and after."""
    try:
        found = {file.name for file in path.iterdir()}
    except FileNotFoundError:
        return None
    return found if path.exists() else None


def test_whoever_looks_while_checkpoints_are_removed_finds_whole_ones(tmp_path: Path) -> None:
    path = _save(tmp_path, 0)
    whole = {file.name for file in path.iterdir()}
    seen: list[set[str] | None] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.extend(_seen(path) for path in tmp_path.glob("step-*"))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for step in range(1, 30):
            _save(tmp_path, step)
    finally:
        over.set()
        looking.join()
    found = [files for files in seen if files is not None]
    assert len(found) > 30
    assert all(files == whole for files in found)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_said_to_be_gone(tmp_path: Path) -> None:
    path = _save(tmp_path, 3)
    checkpoint.remove(path)
    checkpoint.remove(path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="a run removes a checkpoint once the next one is written"):
        read_manifest(path)


class Crash(BaseException):
    """The process is gone at once: nobody cleans up."""


CALLS = ("fsync", "rename", "unlink", "rmdir", "mkdir", "open")


def _crashing(number: int, error: BaseException) -> Iterator[pytest.MonkeyPatch]:
    """The number-th call that touches the disk raises."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise error
            return real(*args, **kwargs)

        return call

    def cut_short(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        counted(real_save)(tensors, path, metadata)

    real_save = checkpoint.save_file
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(checkpoint, "save_file", cut_short)
        yield patch


@pytest.mark.parametrize("next_step", [5, 6], ids=["the same step again", "the next step"])
@pytest.mark.parametrize("error", [Crash(), OSError(errno.EIO, "the disk is gone")], ids=["killed", "failing disk"])
def test_a_crash_anywhere_in_saving_leaves_a_checkpoint_that_loads(
    next_step: int, error: BaseException, tmp_path: Path
) -> None:
    outcomes: list[tuple[int, float]] = []
    for number in range(1, 60):
        folder = tmp_path / str(number)
        _save(folder, 5, 0.5)
        failed = True
        for _ in _crashing(number, error):
            try:
                _save(folder, next_step, 0.75)
                failed = False
            except (Crash, CheckpointError):
                pass
        outcomes.append(_loaded(folder))
        assert failed or outcomes[-1] == (next_step, 0.75)
        _save(folder, 7, 1.0)
        assert _loaded(folder) == (7, 1.0)
        assert [found.name for found in folder.iterdir()] == ["step-000000007"]
    first_new = outcomes.index((next_step, 0.75))
    assert first_new > 5
    assert set(outcomes[:first_new]) == {(5, 0.5)}
    assert set(outcomes[first_new:]) == {(next_step, 0.75)}


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoints import _loaded, _save
_save(folder := Path(sys.argv[1]), 0)
step = 0
for life in range(12):
    child = os.fork()
    if child == 0:
        step = _loaded(folder)[0]
        while True:
            step += 1
            _save(folder, step, float(step))
            _save(folder, step, float(step))
    while max((int(path.name[5:14]) for path in folder.glob("step-*")), default=step) == step:
        time.sleep(0.001)
    time.sleep(0.003 * life)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    step, value = _loaded(folder)
    assert value == step
print(step)
"""


@pytest.mark.slow
def test_a_process_killed_while_saving_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12


@pytest.mark.parametrize("name", ["manifest.json", "shared.safetensors", "worker-0.safetensors"])
def test_damaged_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    file = _save(tmp_path, 5, 0.5) / name
    whole = file.read_bytes()
    changed = [bytes([*whole[:at], whole[at] ^ 1 << at % 8, *whole[at + 1 :]]) for at in range(0, len(whole), 3)]
    for damaged in [*changed, whole[:-1], whole[: len(whole) // 2], b"", whole + b"x"]:
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"step-000000005 .*(damaged|has format)"):
            _loaded(tmp_path)
    file.write_bytes(whole)
    assert _loaded(tmp_path) == (5, 0.5)
    file.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in" if name == "manifest.json" else name):
        _loaded(tmp_path)


def test_checkpoints_of_other_formats_runs_and_sizes_are_refused(tmp_path: Path) -> None:
    path = _save(tmp_path, 5)
    with pytest.raises(CheckpointError, match="another run: its task is 'digits', this run's is 'mnist'"):
        _checkpoints(tmp_path, task="mnist").load()
    later = _checkpoints(tmp_path)
    later._group.rank = 1
    with pytest.raises(CheckpointError, match=r"no state for this worker .worker-1.* written by 1 workers"):
        later.load()
    manifest = path / "manifest.json"
    for text, reason in [('{"format": 9, "files": {}}', "format 9"), ("[]", "damaged"), ('{"files": 3}', "damaged")]:
        manifest.write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            read_manifest(path)
    with pytest.raises(CheckpointError, match="nothing to resume from"):
        _checkpoints(tmp_path / "empty").load()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "offbeat-test", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_and_the_checkpoint_before_is_kept(small_disk: Path) -> None:
    _save(small_disk, 1, 0.5)
    with pytest.raises(CheckpointError, match=r"No space left on device.*step-000000001, is intact"):
        _checkpoints(small_disk).save(2, {"big": torch.zeros(1_000_000)}, {}, {})
    assert [found.name for found in small_disk.iterdir()] == ["step-000000001"]
    assert _loaded(small_disk) == (1, 0.5)
    assert shutil.disk_usage(small_disk).free > 500_000
    assert _save(small_disk, 2, 0.75).name == "step-000000002"

"""Runs that are recorded while they go on, and what must be true of a snapshot, and of a run that goes on from it."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fault_runs import Tally, applied, parameters

from offbeat.run.drive import Result, fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.state.certificates import check, read

STEPS = 24
EVERY = 3
PACE = "worker *: pace 30ms"
"""So that a snapshot can be copied before the next one takes its place."""


@dataclass
class Scene:
    """A strategy, and what happens to its processes."""

    strategy: str
    workers: int = 3
    disturb: list[str] = field(default_factory=lambda: ["any worker: pause 30ms with probability 0.3"])


def random_scene(seed: int) -> Scene:
    """Workers that are apart, and somebody who is killed."""
    chance = random.Random(seed)
    kind = chance.choice(["ssp(1)", "ssp(3)", "ssp(2, eager)", "asp", "asp", "downpour", "gossip", "gossip"])
    scene = Scene("gossip(complete, asynchronous=True)", workers=chance.randint(2, 3))
    blow, step = chance.choice(["worker", "server", "both"]), chance.randint(6, STEPS - 4)
    if kind == "gossip":
        scene.disturb.append(f"worker {chance.randrange(scene.workers)}: kill at step {step}")
        return scene
    shards = chance.randint(1, 2)
    scene.strategy = f"server(shards={shards}, replicas=1, consistency={kind})"
    if kind == "downpour":
        scene.strategy = f"downpour(push=2, fetch=2, shards={shards}, replicas=1)"
    if blow != "worker":
        scene.disturb.append(f"server {chance.randrange(shards)}: kill at step {step // 2}")
    if blow != "server":
        scene.disturb.append(f"worker {chance.randrange(1, scene.workers)}: kill at step {step}")
    return scene


@contextmanager
def kept(runs: Path, to: Path) -> Iterator[None]:
    """Every snapshot of the run inside is copied before a later checkpoint takes its place."""
    over = threading.Event()
    to.mkdir()

    def copy() -> None:
        while not over.wait(0.005):
            for path in runs.glob("*/checkpoint/step-*"):
                if (path / "manifest.json").exists() and (path / "certificate.json").exists():
                    _copy(path, to / path.name)

    thread = threading.Thread(target=copy, name="copier")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _copy(path: Path, to: Path) -> None:
    draft = to.with_name(f".{to.name}")
    if to.exists():
        return
    try:
        shutil.copytree(path, draft)
        if not path.exists():  # Its removal had begun, by which it loses its name.
            raise FileNotFoundError(path)
        draft.rename(to)
    except OSError:  # It was removed meanwhile.
        shutil.rmtree(draft, ignore_errors=True)


def photographed(scene: Scene, launcher: Launcher, folder: Path) -> list[Path]:
    """Let it happen; answers the snapshots that were taken."""
    with kept(folder / "runs", folder / "kept"):
        _fit(scene, launcher, folder, disturb=[*scene.disturb, PACE])
    return sorted(path for path in (folder / "kept").iterdir() if not path.name.startswith("."))


def _fit(scene: Scene, launcher: Launcher, folder: Path, **more: object) -> Result:
    return fit(
        Tally(str(folder)),
        scene.strategy,
        workers=scene.workers,
        steps=STEPS,
        seed=7,
        target=1e9,
        timeout=60.0,
        checkpoint_every=EVERY,
        launcher=launcher,
        **{"out": folder / "runs", **more},  # pyright: ignore[reportArgumentType]
    )


def goes_on(snapshot: Path, scene: Scene, launcher: Launcher, folder: Path) -> None:
    """The snapshot is certified, and a run that goes on from it has every push, or every move, once."""
    found = check(snapshot)
    assert not found.faults, found
    certificate = read(snapshot)
    (run,) = (folder / "runs").glob("2*")
    again = folder / "again" / run.name
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoint")
    shutil.copytree(snapshot, again / "checkpoint" / snapshot.name)
    result = _fit(scene, launcher, folder, resume=again)
    told = f"{scene} {certificate}: {result.servers}"
    weight = parameters(result)["weight"]
    assert result.steps == STEPS, told
    if certificate.kind == "gossip":
        # One who has died takes with it the halves of moves that it had granted: then the mean is only near.
        most = 1e-2 if len(certificate.pairs) == scene.workers else STEPS / 2
        assert bool(((weight - STEPS).abs() < most).all()), f"{told}: counted {weight}"
        return
    clocks = {cut.worker: cut.clock for cut in certificate.workers}
    first = certificate.workers[0].clock
    pushes = STEPS // 2 if scene.strategy.startswith("downpour") else STEPS
    left = sum(pushes - clocks.get(worker, first) for worker in range(scene.workers))
    for account, cut in zip(result.servers, certificate.shards, strict=True):
        assert applied(account) == left + len(cut.in_flight), told
        assert account["pushes"].get("duplicate", 0) == 0, told
        assert account["version"] == cut.version + applied(account), told
    everybody = not any(said.startswith("worker") and "kill" in said for said in scene.disturb)
    if everybody and scene.strategy.startswith("server"):
        assert bool(((weight - STEPS).abs() < 1e-2).all()), f"{told}: counted {weight}"

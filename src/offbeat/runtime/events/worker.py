"""A worker of a run that is watched: its events are written down, and it answers when asked what it is doing."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter  # pyright: ignore[reportPrivateUsage]

from offbeat.runtime.backend import stand_in_for_gloo
from offbeat.runtime.events.groups import stamp_groups
from offbeat.runtime.events.recorder import COMPUTING, INPUT, RECORDER, Mark, Recorder, events_file, stack_file

ASK: Final = signal.SIGRTMIN + 7
"""The signal on which a worker writes down its stack; one that no program uses by habit."""


@contextmanager
def written_down(folder: Path, rank: int, ours: bool) -> Generator[None]:
    """Write down what happens in here; `ours`: whether Gloo's place is taken by our own backend."""
    stack_file(folder, rank).parent.mkdir(exist_ok=True)
    with stack_file(folder, rank).open("w") as stack:
        # Before there are events by which this process can be found: unanswered, the signal would end it.
        faulthandler.register(ASK, stack, all_threads=False)
        try:
            recorder = _recording(folder, rank, ours)
            yield
        finally:
            faulthandler.unregister(ASK)
            signal.signal(ASK, signal.SIG_IGN)
    recorder.look()
    recorder.stamp(Mark.END)


def _recording(folder: Path, rank: int, ours: bool) -> Recorder:
    path = events_file(folder, rank)
    path.unlink(missing_ok=True)  # A file that somebody reads must not shrink.
    recorder = Recorder(path, rank)
    RECORDER.set(recorder)
    if ours:
        stand_in_for_gloo()
    stamp_groups(recorder)

    def stepping(*_: Any) -> None:
        recorder.step()

    register_optimizer_step_pre_hook(stepping)
    _see_input(recorder)
    return recorder


def _see_input(recorder: Recorder) -> None:
    """Write down when a DataLoader is waited for: what is not input is computing, unless somebody knows better."""
    stock = _BaseDataLoaderIter.__next__

    def following(self: Any) -> Any:
        before = recorder.turn(INPUT)
        try:
            return stock(self)
        finally:
            recorder.turn(before or COMPUTING)

    _BaseDataLoaderIter.__next__ = following


def ask(process: int) -> None:
    """Have a worker write down its stack."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, ASK)

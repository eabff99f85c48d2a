"""A worker of a watched run: its events are recorded, and it dumps its stack on request."""

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

DUMP_STACK: Final = signal.SIGRTMIN + 7  # The signal on which a worker dumps its stack; few programs use it.


@contextmanager
def written_down(folder: Path, rank: int, ours: bool) -> Generator[None]:
    """Record the events of the body; `ours`: whether our backend stands in for Gloo."""
    stack_file(folder, rank).parent.mkdir(parents=True, exist_ok=True)
    with stack_file(folder, rank).open("w") as stack:
        # Before events make this process known: an unhandled signal would end it.
        faulthandler.register(DUMP_STACK, stack, all_threads=False)
        try:
            recorder = _start_recording(folder, rank, ours)
            yield
        finally:
            faulthandler.unregister(DUMP_STACK)
            signal.signal(DUMP_STACK, signal.SIG_IGN)
    recorder.look()
    recorder.stamp(Mark.END)


def _start_recording(folder: Path, rank: int, ours: bool) -> Recorder:
    path = events_file(folder, rank)
    path.unlink(missing_ok=True)  # A file being read must not shrink.
    recorder = Recorder(path, rank)
    RECORDER.set(recorder)
    if ours:
        stand_in_for_gloo()
    stamp_groups(recorder)
    register_optimizer_step_pre_hook(lambda _optimizer, _args, _kwargs: recorder.step())
    stock = _BaseDataLoaderIter.__next__

    def next_batch(self: Any) -> Any:
        """Record waits for a DataLoader; time outside them counts as computing unless known better."""
        before = recorder.turn(INPUT)
        try:
            return stock(self)
        finally:
            recorder.turn(before or COMPUTING)

    _BaseDataLoaderIter.__next__ = next_batch
    return recorder


def ask(process: int) -> None:
    """Make a worker dump its stack."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, DUMP_STACK)

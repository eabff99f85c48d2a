"""Operations in line: what was asked for first is done first, on a thread of its own if nobody waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as _c10d  # pyright: ignore[reportPrivateUsage]

from offbeat.runtime.backend._call_ids import CollectiveError

may_be_waited_for_by_tensor = _c10d._allow_inflight_collective_as_graph_input  # pyright: ignore[reportPrivateUsage]
"""Whether torch is to know what is under way by its tensors, so that a compiled function can wait for its arguments."""


class Finished(dist._Work):  # pyright: ignore[reportPrivateUsage]
    """What was done before the call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """There is nothing to wait for."""
        del timeout
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """A failure would have been raised at once."""
        return True

    def exception(self) -> Any:
        """A failure would have been raised at once."""
        return None

    def result(self) -> list[Tensor]:
        """What it was done to is the caller's."""
        return []

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is there already."""
        future = torch.futures.Future[list[Tensor]]()
        future.set_result([])
        return future


class QueuedOp(dist._Work):  # pyright: ignore[reportPrivateUsage]
    """An operation that stands in line."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._announced: Sequence[Tensor] = ()
        self._running = threading.Lock()
        self._running.acquire()
        self._failure: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._guard = threading.Lock()
        self._over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done; raise what it failed of."""
        if not self._over:
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._running.acquire(timeout=seconds if seconds > 0 else -1):
                raise CollectiveError(f"Timed out after {seconds:g} s: the operation is still in line or at work.")
            self._running.release()
        if self._announced:
            self._forget()
        if self._failure is not None:
            raise self._failure
        return True

    def announce(self, tensors: Sequence[Tensor]) -> None:
        """Let who waits for one of these tensors (`wait_tensor`) wait for this."""
        self._announced = tensors
        for tensor in tensors:
            _c10d._register_work(tensor, self)  # pyright: ignore[reportPrivateUsage]

    def _forget(self) -> None:
        """Torch would keep it, and so its tensors, until somebody waits for each of them."""
        tensors, self._announced = self._announced, ()
        for tensor in tensors:
            with suppress(RuntimeError):  # This one's is about to be told, another's when that is waited for.
                torch.ops._c10d_functional.wait_tensor(tensor)

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, one way or the other."""
        return self._over

    def is_success(self) -> bool:
        """Whether it is over and well."""
        return self._over and self._failure is None

    def exception(self) -> Any:
        """What it failed of."""
        return self._failure

    def result(self) -> list[Tensor]:
        """What it was done to."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Resolves to the tensors."""
        with self._guard:
            if self._future is None:
                self._future = torch.futures.Future[list[Tensor]]()
                if self._over:
                    self._resolve(self._future)
            return self._future

    @property
    def followed(self) -> bool:
        """Whether somebody has asked for a future."""
        return self._future is not None

    def end(self, failure: BaseException | None) -> None:
        """It is over; called by who did it."""
        self._failure = failure
        with self._guard:
            self._over = True
            future = self._future
        self._running.release()
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)  # pyright: ignore[reportArgumentType]
        else:
            future.set_result(self._tensors)


class OpQueue:
    """One group's operations, one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lock = threading.Lock()
        """Whose turn it is."""
        self.queue: deque[tuple[Callable[[], None], QueuedOp]] = deque()
        self._filled = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False

    def idle(self) -> bool:
        """Take the turn if nothing stands in line; whoever gets it must call `leave`."""
        return not self.queue and not self._closed and self.lock.acquire(False)

    def leave(self) -> None:
        """Give the turn back."""
        self.lock.release()

    def wait_for_turn(self) -> None:
        """Have the turn, when everything that stands in line now is done; whoever gets it must call `leave`."""
        while self.queue:
            self.put(lambda: None, ()).wait()
        self.lock.acquire()

    def put(self, act: Callable[[], None], tensors: Sequence[Any]) -> QueuedOp:
        """Stand in line."""
        if self._closed:
            raise CollectiveError("this group has been destroyed: nothing more can be done with it")
        pending = QueuedOp(tensors)
        if self._thread is threading.current_thread():
            # Asked for by what follows on a future, while everybody else waits: its turn is now, on every rank.
            pending.end(_failure_of(act))
            return pending
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"offbeat {self._name}", daemon=True)
            self._thread.start()
        self.queue.append((act, pending))
        self._filled.release()
        return pending

    def _serve(self) -> None:
        while True:
            self._filled.acquire()
            if not self.queue:
                return  # Woken by `close`, when everything is done.
            with self.lock:  # Taken out only now: who finds the line empty may go ahead of nobody.
                act, pending = self.queue.popleft()
                failure = _failure_of(act)
                followed = pending.followed
                if followed:  # What follows on a future may ask for more, which must come before what stands in line.
                    pending.end(failure)
            if not followed:
                pending.end(failure)
            del act, pending, failure

    def close(self, give_up: Callable[[], None]) -> None:
        """Finish what stands in line, and take nothing more; what is not done in 5 s is given up."""
        self._closed = True
        self._filled.release()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            give_up()
            self._thread.join(timeout=5.0)


def _failure_of(act: Callable[[], None]) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None

"""The queue of a group's operations: first come, first served, on a thread of its own if the caller does not wait."""

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
"""Whether torch must know operations in flight by their tensors, so that a compiled function can wait for them."""
_Future = torch.futures.Future[list[Tensor]]


class QueuedOp(dist._Work):  # pyright: ignore[reportPrivateUsage]
    """The work of an operation in the queue."""

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
        if not self._over:
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._running.acquire(timeout=seconds if seconds > 0 else -1):
                raise CollectiveError(f"Timed out after {seconds:g} s: the operation is still queued or running.")
            self._running.release()
        if self._announced:
            self._forget()
        if self._failure is not None:
            raise self._failure
        return True

    def announce(self, tensors: Sequence[Tensor]) -> None:
        """Let `wait_tensor` on one of these tensors wait for this operation."""
        self._announced = tensors
        for tensor in tensors:
            _c10d._register_work(tensor, self)  # pyright: ignore[reportPrivateUsage]

    def _forget(self) -> None:
        """Torch would keep this work, and so its tensors, until each of them is waited for."""
        tensors, self._announced = self._announced, ()
        for tensor in tensors:
            with suppress(RuntimeError):  # This one's is about to be raised, another's when that is waited for.
                torch.ops._c10d_functional.wait_tensor(tensor)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._over

    def is_success(self) -> bool:
        return self._over and self._failure is None

    def exception(self) -> Any:
        return self._failure

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        with self._guard:
            if self._future is None:
                self._future = _Future()
                if self._over:
                    self._resolve(self._future)
            return self._future

    @property
    def followed(self) -> bool:
        """Whether a caller holds its future."""
        return self._future is not None

    def end(self, failure: BaseException | None) -> None:
        """Mark it as over; called by whoever ran it."""
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


class Finished(QueuedOp):
    """The work of an operation that was done before the call returned; a failure would have been raised there."""

    mark = 0  # Of a message.

    def __init__(self) -> None:
        super().__init__(())
        self.end(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future = _Future()
        future.set_result([])
        return future


class OpQueue:
    """One group's operations, one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lock = threading.Lock()
        """The turn: held by whoever runs an operation."""
        self.queue: deque[tuple[Callable[[], None], QueuedOp]] = deque()
        self._filled = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False

    def idle(self) -> bool:
        """Take the turn if the queue is empty; whoever gets it must call `leave`."""
        return not self.queue and not self._closed and self.lock.acquire(False)

    def leave(self) -> None:
        self.lock.release()

    def wait_for_turn(self) -> None:
        """Take the turn when everything in the queue now is done; the caller must call `leave`."""
        while self.queue:
            self.put(lambda: None, ()).wait()
        self.lock.acquire()

    def put(self, act: Callable[[], None], tensors: Sequence[Any]) -> QueuedOp:
        if self._closed:
            raise CollectiveError("this group has been destroyed: nothing more can be done with it")
        pending = QueuedOp(tensors)
        if self._thread is threading.current_thread():
            # Called by what follows on a future, while all others wait: its turn is now, on every rank.
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
            with self.lock:  # Removed only now: a caller that finds the queue empty may overtake nobody.
                act, pending = self.queue.popleft()
                failure = _failure_of(act)
                followed = pending.followed
                if followed:  # What follows on a future may start more, which must come before the rest of the queue.
                    pending.end(failure)
            if not followed:
                pending.end(failure)
            del act, pending, failure

    def close(self, give_up: Callable[[], None]) -> None:
        """Finish the queue and accept nothing more; what is not done in 5 s is given up."""
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

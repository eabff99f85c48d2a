"""Point-to-point messages of a group, with an error that explains why one did not arrive.

Between the ranks of one host they go through shared memory (`channels`); between hosts, and without the compiled
library, over Gloo.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.runtime.backend._call_ids import CollectiveError, ranks_in_words, shapes
from offbeat.runtime.backend._checks import alike, dense, in_place, listed
from offbeat.runtime.backend._fast_path import DONE, profile, profiling
from offbeat.runtime.backend._op_queue import QueuedOp, may_be_waited_for_by_tensor
from offbeat.runtime.collectives.messages.channels import LATE, WRONG_SIZE, Channels
from offbeat.runtime.collectives.one_sided.arena import LEFT, Arena
from offbeat.runtime.events.calls import BareWork, handing_on

_CHECKS, _PAUSE = 10, 0.02
"""Checks for dead peers, and seconds between them: a process closes its connections a moment before it is gone."""
_SOON, _SLICE = 2_000_000, 100_000_000
"""Nanoseconds until a peer is asked to make progress in the background, and between checks of whether it is alive."""
_ANY = -1


@handing_on
class Carried(BareWork):
    """The work of a message in flight over Gloo."""

    def __init__(self, work: Any, explained: Callable[[Exception], Exception]) -> None:
        super().__init__()
        self._work, self._explained = work, explained

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._explained(error) from error

    def synchronize(self) -> None:
        self.wait()


class GlooMessages:
    """Messages over Gloo."""

    marks = False
    """Whether a message can carry a mark."""

    def __init__(self, gloo: Any, stock: Any, rank: int, names: Sequence[int], arena: Arena | None) -> None:
        self._gloo, self._stock, self._rank, self._names, self._arena = gloo, stock, rank, names, arena
        self._count = 0

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        """Start a send."""
        tensors = listed(tensors)
        return self._begin("send", tensors, peer, lambda gloo: gloo.send(tensors, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        """Start a receive; peer -1 means any rank."""
        tensors = listed(tensors)
        if peer == _ANY:
            return self._begin("recv", tensors, None, lambda gloo: gloo.recv_anysource(tensors, tag))
        return self._begin("recv", tensors, peer, lambda gloo: gloo.recv(tensors, peer, tag))

    def close(self) -> None:
        """Gloo's group is closed by itself."""

    def _begin(self, what: str, tensors: list[Tensor], peer: int | None, act: Callable[[Any], Any]) -> Carried:
        check_peer(peer, len(self._names))  # Gloo would read memory that is not there.
        self._count += 1
        explained = partial(self._undelivered, what, self._count, tensors, peer)
        # Only torch's dispatcher registers a message by its tensors.
        gloo = self._gloo if alike(tensors) and not may_be_waited_for_by_tensor() else self._stock
        try:
            return Carried(act(gloo), explained)
        except RuntimeError as error:
            raise explained(error) from error

    def _undelivered(
        self, what: str, number: int, tensors: Sequence[Tensor], peer: int | None, error: Exception
    ) -> CollectiveError:
        """An error with the message, which of its peers have died, and what Gloo says."""
        dead = self._dead(self._names if peer is None else (self._names[peer],))
        why = f"{ranks_in_words(dead)} died: " if dead else ""
        whom = None if peer is None else self._names[peer]
        return CollectiveError(
            f"{why}{describe(what, self._names[self._rank], whom, number, tensors)} cannot be finished. Gloo says: "
            f"{error}"
        )

    def _dead(self, peers: Sequence[int]) -> list[int]:
        arena = self._arena
        if arena is None:
            return []
        for _ in range(_CHECKS):
            if dead := [arena.names[rank] for rank in arena.dead() if arena.names[rank] in peers]:
                return dead
            time.sleep(_PAUSE)
        return []


def check_peer(peer: int | None, size: int) -> None:
    """Refuse a rank that the group does not have."""
    if peer is not None and not 0 <= peer < size:
        raise ValueError(f"there is no rank {peer} in a group of {size}: ranks go from 0 to {size - 1}")


def describe(what: str, rank: int, peer: int | None, number: int, tensors: Sequence[Tensor]) -> str:
    """A message in words."""
    whom = "any rank" if peer is None else f"rank {peer}"
    direction = "to" if what == "send" else "from"
    return f"rank {rank} in {what} {direction} {whom} (message #{number} of this group) of shape {shapes(tensors)}"


class MessageWork(QueuedOp):
    """The work of a message in flight through shared memory."""

    def __init__(self, messages: HostMessages, op: int, what: str, tensor: Tensor, held: Tensor, peer: int) -> None:
        super().__init__([tensor])
        self.op, self.what, self.tensor, self.held, self.peer = op, what, tensor, held, peer
        self.number = messages.count
        self.source, self.mark = peer, 0
        self.ended: Callable[[], None] | None = None
        """Ends its event for torch's profiler."""
        self._messages = messages
        self._finishing = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        with self._finishing:
            if not self._over:
                self._messages.finish(self, seconds if seconds > 0 else None)
        return super().wait()

    def is_completed(self) -> bool:
        if not self._over and self._finishing.acquire(blocking=False):
            try:
                if not self._over and self._messages.channels.over(self.op):
                    self._messages.finish(self, None)
            finally:
                self._finishing.release()
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._failure is None

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future = super().get_future()
        if not self._over:
            threading.Thread(target=self._wait_quietly, daemon=True).start()
        return future

    def _wait_quietly(self) -> None:
        with suppress(CollectiveError):  # Its future has the error.
            self.wait()

    def _source_rank(self) -> int:
        return self.source


class HostMessages:
    """Messages through shared memory, between the ranks of a group that is on one host."""

    marks = True
    """Whether a message can carry a mark."""

    def __init__(
        self, channels: Channels, arena: Arena, stock: GlooMessages, timeout: Callable[[], float], backend: str
    ) -> None:
        self.channels, self._arena, self._stock, self._timeout = channels, arena, stock, timeout
        self._backend = backend
        self.count = 0
        """Messages begun so far."""
        self._pending: set[MessageWork] = set()
        self._abandoned: list[MessageWork] = []
        """Messages that failed: a peer may still touch their memory."""
        weakref.finalize(self, channels.close).atexit = False

    def send(self, tensors: Any, peer: int, tag: int, mark: int = 0) -> Any:
        """Start a send; the work of its receive has the mark, or is done if that is 0."""
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else tensors
        if type(tensor) is not Tensor or not _plain(tensor):
            if not isinstance(tensor, Tensor) or not alike([tensor]):
                return self._stock.send(tensors, peer, tag)
            held = dense(tensor.detach())
        else:
            held = tensor
        if not 0 <= peer < self._arena.size:
            check_peer(peer, self._arena.size)
        self.count += 1
        ended = profile(f"{self._backend}:send", [tensor]) if profiling() else None
        op = self.channels.send(peer, tag, held.data_ptr(), held.numel() * held.element_size(), mark)
        if op is None and ended is None:
            return DONE
        return self._in_flight(op, "send", tensor, held, peer, ended)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        """Start a receive; peer -1 means any rank."""
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else tensors
        if type(tensor) is not Tensor or not _plain(tensor):
            if not isinstance(tensor, Tensor) or not alike([tensor]):
                return self._stock.recv(tensors, peer, tag)
            held = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
            with in_place([tensor]):  # Refuses a tensor whose elements overlap, before anything has come.
                pass
        else:
            held = tensor
        if not -1 <= peer < self._arena.size:
            check_peer(peer, self._arena.size)
        self.count += 1
        event = "recvAnySource" if peer == _ANY else "recv"
        ended = profile(f"{self._backend}:{event}", [tensor]) if profiling() else None
        op = self.channels.receive(peer, tag, held.data_ptr(), held.numel() * held.element_size())
        if op is None and held is tensor and ended is None:
            return DONE
        return self._in_flight(op, "recv", tensor, held, peer, ended)

    def _in_flight(
        self, op: int | None, what: str, tensor: Tensor, held: Tensor, peer: int, ended: Callable[[], None] | None
    ) -> MessageWork:
        work = MessageWork(self, op or 0, what, tensor, held, peer)
        work.ended = ended
        if may_be_waited_for_by_tensor():
            work.announce([tensor])
        if op is None:
            self._end(work, None)
            return work
        self._pending.add(work)
        if len(self._pending) % 64 == 0:
            for other in list(self._pending):
                other.is_completed()
        self.channels.help_in_background()
        return work

    def finish(self, work: MessageWork, seconds: float | None) -> None:
        """Wait for a message and end its work; raises only if it takes longer than the given seconds."""
        channels, op, started = self.channels, work.op, time.monotonic()
        code = channels.wait(op, _SOON)
        while code == LATE:
            for peer in self._arena.others if work.peer == _ANY else (work.peer,):
                channels.nudge(peer)
            if (why := self._hopeless(work, started, seconds)) and not channels.over(op):
                if seconds is not None and time.monotonic() - started > seconds and not self._gone(work):
                    raise CollectiveError(f"Timed out after {seconds:g} s: {self._in_words(work)} is still in flight.")
                self._abandoned.append(work)
                self._end(work, CollectiveError(why))
                return
            code = channels.wait(op, _SLICE)
        failure = None
        if code == WRONG_SIZE:
            failure = CollectiveError(
                f"{self._in_words(work)} cannot be finished: the message that came has {channels.arrived(op):,} bytes, "
                f"and the tensor takes {work.held.nbytes:,}. Send and receive must have the same shape and dtype."
            )
        if work.what == "recv":
            work.source, work.mark = channels.source(op), channels.mark(op)
        channels.free(op)
        self._end(work, failure)

    def _end(self, work: MessageWork, failure: BaseException | None) -> None:
        if failure is None and work.what == "recv" and work.held is not work.tensor:
            work.tensor.detach().copy_(work.held)
        self._pending.discard(work)
        if work.ended is not None:  # On another thread, as Gloo does: torch takes an event for asynchronous by that.
            ending = threading.Thread(target=work.ended)
            ending.start()
            ending.join()
        work.end(failure)

    def _gone(self, work: MessageWork) -> list[int]:
        """The peers of a message that have died or left."""
        peers = self._arena.others if work.peer == _ANY else (work.peer,)
        gone = {*self._arena.dead(), *self._arena.board.with_status(LEFT)} & set(peers)
        return sorted(gone) if len(gone) == len(peers) else []

    def _hopeless(self, work: MessageWork, started: float, seconds: float | None) -> str:
        """Why a message will not arrive, in words; empty if it still may."""
        arena = self._arena
        if arena.aborted:
            return f"this rank has aborted the group: {self._in_words(work)} cannot be finished"
        if gone := self._gone(work):
            dead = [arena.names[peer] for peer in gone if peer in arena.dead()]
            names = [arena.names[peer] for peer in gone]
            why = f"{ranks_in_words(dead)} died" if dead else f"{ranks_in_words(names)} left the group"
            return f"{why}: {self._in_words(work)} cannot be finished."
        patience = self._timeout() if seconds is None else seconds
        if time.monotonic() - started > patience:
            return f"Timed out after {patience:g} s: {self._in_words(work)} cannot be finished."
        return ""

    def _in_words(self, work: MessageWork) -> str:
        names, me = self._arena.names, self._arena.rank
        peer = None if work.peer == _ANY else names[work.peer]
        return describe(work.what, names[me], peer, work.number, [work.tensor])

    def close(self) -> None:
        """End the background thread, when no call is running."""
        self.channels.close()


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory can be sent as it is."""
    usual = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
    return usual and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized

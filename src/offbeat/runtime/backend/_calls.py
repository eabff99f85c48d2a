"""The calls on one group: whose turn it is, which one is being done, and what to say when it cannot be finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from offbeat.runtime.backend._call_ids import CollectiveError, in_words, ranks_in_words, shapes
from offbeat.runtime.backend._checks import flat, operation_of
from offbeat.runtime.backend._fast_path import DONE, profiling, quick
from offbeat.runtime.backend._in_host import HostCollectives
from offbeat.runtime.backend._op_queue import OpQueue, QueuedOp, may_be_waited_for_by_tensor
from offbeat.runtime.collectives.one_sided.arena import HAS_FAILED, Room
from offbeat.runtime.collectives.one_sided.native import UNKNOWN, Turns

_UNSET = timedelta(milliseconds=-1)
_begin_event: Any = torch._C._autograd._record_function_with_args_enter  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class Calls:
    """Operations of one group, done one at a time in the order in which they were asked for."""

    def __init__(self, label: str, backend: str, gloo: Any) -> None:
        self._label, self._backend, self._gloo = label, backend, gloo
        self.line = OpQueue(label)
        self._room: Room | None = None
        self._local: Any = None
        self._asked = 0
        self._now: tuple[str, Sequence[Tensor], Any] = ("its first operation", (), None)
        self._spoiled = ""

    def use(self, room: Room | None, local: HostCollectives | None) -> None:
        """From now on operations are done in this room; `local`: what collectives go through it."""
        self._room, self._local = room, local
        self._quick = quick(None if local is None else local.runner, self.line)
        self.begin: Callable[[Any, Any], Any] = self._quick.begin
        """Begins an all-reduce that is known; see `Unbegun`."""

    @property
    def asked(self) -> int:
        """How many operations were asked for."""
        return self._asked + self._quick.asked

    # -- doing it ----------------------------------------------------------------------------------------------------

    def do(self, what: str, act: Callable[[], None], options: Any, tensors: Sequence[Tensor], result: Any) -> Any:
        """Do it now if its caller waits for it and nothing stands in line; else stand in line."""
        self._asked += 1

        def acted() -> None:
            self._now = (what, tensors, options)
            self._in_step(act)

        if profiling():
            acted = self._recorded(what, acted, tensors)
        elif not options.asyncOp and self.line.idle():
            try:
                acted()
            finally:
                self.line.leave()
            return DONE
        pending = self.line.put(acted, result)
        if may_be_waited_for_by_tensor():
            pending.announce(flat(result))
        return pending

    def finish(self, begun: tuple[Turns, int], tensors: list[Tensor], options: Any) -> Any:
        """What `begin` began goes on: somebody is late, or it is not compiled for this turn. The turn is had."""
        self._now = ("all_reduce", tensors, options)
        turns, code = begun
        try:
            if code == UNKNOWN:
                self._local.all_reduce(tensors, operation_of(options))
            else:
                self._local.runner.finish(turns, code)
        except BaseException as error:
            self._spoil(error)
            raise
        finally:
            self.line.leave()
        return DONE

    def at_once(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor]) -> None:
        """Do it when all that stands in line is done."""
        self.line.wait_for_turn()
        try:
            self._now = (what, tensors, None)
            self._in_step(act)
        finally:
            self.line.leave()

    def later(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor]) -> QueuedOp:
        """The same on the group's thread."""

        def acted() -> None:
            self._now = (what, tensors, None)
            self._in_step(act)

        return self.line.put(acted, tensors)

    def _in_step(self, act: Callable[[], None]) -> None:
        """Do it, unless an earlier one broke off in the middle: signals and slots would be taken for another's."""
        if self._spoiled:
            raise CollectiveError(
                f"{self._now[0]} cannot be done, because ranks of this group may be out of step since {self._spoiled}. "
                f"Destroy the group and make a new one."
            )
        room = self._room
        before = 0 if room is None else room.board.calls
        try:
            act()
        except BaseException as error:
            if room is not None and room.board.calls != before:
                self._spoil(error)
            raise

    def _spoil(self, error: BaseException) -> None:
        """Let nobody use the shared memory again, here or on other ranks."""
        room: Any = self._room
        if not self._spoiled:
            what = str(error).split(". ")[0] or type(error).__name__
            self._spoiled = f"{self._now[0]} #{room.board.calls} failed ({what})"
        if self._local is not None:
            self._local.runner.plans.clear()
        room.fail()

    def _recorded(self, what: str, act: Callable[[], None], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """An event for torch's profiler, as Gloo makes them: from the call until it is done, on another thread."""
        record = _begin_event(f"{self._backend}:{what}", *tensors)
        done: Any = torch.futures.Future()
        # The profiler is the caller's alone: another thread ends an event only through a future, which brings it along.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, done)

        def recorded() -> None:
            try:
                act()
            finally:
                done.set_result(None)

        return recorded

    def close(self) -> None:
        """Finish what stands in line, and take nothing more."""
        self.line.close(self.abort)

    def abort(self) -> None:
        """Give up whatever is going on here; those who wait for it get an error."""
        if self._room is not None:
            self._room.aborted = True
            self._room.fail()

    # -- what went wrong, in words -----------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """Torch tells the Gloo group beside this one when it is to be another (`_set_pg_timeout`)."""
        return self._gloo.options._timeout

    def patience(self) -> float:
        """Seconds that the operation which is being done may wait."""
        own = getattr(self._now[2], "timeout", _UNSET)
        return (own if own > timedelta(0) else self.timeout).total_seconds()

    def explained(self, why: str, peers: Sequence[int]) -> Exception:
        """An error that says why nothing more can come from these ranks of the room, and where everybody is."""
        room: Any = self._room
        what, tensors, _ = self._now
        number = room.board.calls
        places = room.board.whereabouts()
        there = [room.names[rank] for rank, (calls, _) in enumerate(places) if calls >= number]
        absent = [rank for rank, (calls, _) in enumerate(places) if calls < number]
        me = f"rank {room.names[room.rank]} in {what} #{number}"
        shape = f" of shape {shapes(tensors)}" if tensors else ""
        arrived = f"{ranks_in_words(there)} had arrived"
        if why == HAS_FAILED and absent:
            why = ""  # Whoever failed gave up waiting for the same ones.
        if why and peers:
            who = ranks_in_words([room.names[peer] for peer in peers])
            return CollectiveError(f"{who} {why}: {me}{shape} cannot be finished. {arrived[0].upper()}{arrived[1:]}.")
        if why:
            return CollectiveError(f"{why}: {me}{shape} cannot be finished")
        late = absent or list(peers)
        lasts = "; ".join(
            f"rank {room.names[rank]} was last seen in {in_words(places[rank][1])} #{places[rank][0]}" for rank in late
        )
        return CollectiveError(
            f"{me}{shape} of group {self._label or 'default'!s}: Timed out after {room.waited():.3g} s of waiting for "
            f"{ranks_in_words([room.names[rank] for rank in late])}; {arrived}. {lasts}."
        )

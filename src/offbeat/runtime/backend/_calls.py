"""The calls on one group: one at a time, in order, with an error that explains why one cannot be finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from offbeat.runtime.backend._call_ids import CollectiveError, ConsequenceError, in_words, ranks_in_words, shapes
from offbeat.runtime.backend._checks import flat
from offbeat.runtime.backend._fast_path import DONE, profile, profiling, quick
from offbeat.runtime.backend._op_queue import OpQueue, QueuedOp, may_be_waited_for_by_tensor
from offbeat.runtime.backend.in_host.collectives import HostCollectives
from offbeat.runtime.backend.in_host.runner import UnequalBlocksError
from offbeat.runtime.collectives.one_sided.arena import HAS_FAILED, Arena
from offbeat.runtime.collectives.one_sided.native import UNKNOWN, Turns

_UNSET = timedelta(milliseconds=-1)


class Calls:
    """Operations of one group, run one at a time in the order of their calls."""

    def __init__(self, label: str, backend: str, gloo: Any) -> None:
        self._label, self._backend, self._gloo = label, backend, gloo
        self.line = OpQueue(label)
        self._arena: Arena | None = None
        self._local: Any = None
        self._asked = 0
        self._now: tuple[str, Sequence[Tensor], Any] = ("its first operation", (), None)
        self._spoiled = ""

    def use(self, arena: Arena | None, local: HostCollectives | None) -> None:
        """From now on run operations in this arena; `local` are the collectives that go through it."""
        self._arena, self._local = arena, local
        self._quick = quick(None if local is None else local.runner, self.line)
        self.begin: Callable[..., Any] = self._quick.begin
        """Starts a collective that has a plan; see `Unbegun`."""

    @property
    def asked(self) -> int:
        """Number of operations called so far."""
        return self._asked + self._quick.asked

    def do(
        self,
        what: str,
        act: Callable[[], None],
        options: Any,
        tensors: Sequence[Tensor],
        result: Any,
        begun: tuple[Turns, int] | None = None,
        unequal: Callable[[], None] | None = None,
    ) -> Any:
        """Run it now if the call is synchronous and the queue is empty; otherwise queue it.

        Args:
            what: the collective.
            act: runs it.
            options: of the call.
            tensors: for error messages.
            result: tensors of the result.
            begun: what the fast path has started and not finished, if it has.
            unequal: finishes what it has started, if not all ranks' blocks fit into slots.

        """
        if begun is not None:
            return self._finish(begun, what, act, options, tensors, unequal)
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

    def _finish(
        self,
        begun: tuple[Turns, int],
        what: str,
        act: Callable[[], None],
        options: Any,
        tensors: Sequence[Tensor],
        unequal: Callable[[], None] | None,
    ) -> Any:
        """Finish what `begin` started, holding the turn: a rank is late, or it is not compiled for this slot."""
        self._now = (what, tensors, options)
        turns, code = begun
        try:
            if code == UNKNOWN:
                act()
            else:
                try:
                    self._local.runner.finish(turns, code)
                except UnequalBlocksError:
                    if unequal is None:
                        raise
                    unequal()
        except BaseException as error:
            self._spoil(error)
            raise
        finally:
            self.line.leave()
        return DONE

    def at_once(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor]) -> None:
        """Run it when everything in the queue is done."""
        self.line.wait_for_turn()
        try:
            self._now = (what, tensors, None)
            self._in_step(act)
        finally:
            self.line.leave()

    def later(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor]) -> QueuedOp:
        """Queue it for the group's thread."""

        def acted() -> None:
            self._now = (what, tensors, None)
            self._in_step(act)

        return self.line.put(acted, tensors)

    def _in_step(self, act: Callable[[], None]) -> None:
        """Run it, unless an earlier one failed midway: its signals and slots would be mistaken for this one's."""
        if self._spoiled:
            raise CollectiveError(
                f"{self._now[0]} cannot be done, because ranks of this group may be out of step since {self._spoiled}. "
                f"Destroy the group and create a new one."
            )
        arena = self._arena
        before = 0 if arena is None else arena.board.calls
        try:
            act()
        except BaseException as error:
            if arena is not None and arena.board.calls != before:
                self._spoil(error)
            raise

    def _spoil(self, error: BaseException) -> None:
        """Stop all use of the shared memory, here and on other ranks."""
        arena: Any = self._arena
        if not self._spoiled:
            what = str(error).split(". ")[0] or type(error).__name__
            self._spoiled = f"{self._now[0]} #{arena.board.calls} failed ({what})"
        if self._local is not None:
            self._local.runner.plans.clear()
        arena.fail()

    def _recorded(self, what: str, act: Callable[[], None], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """An event for torch's profiler, as Gloo records them: from the call until it is done, on another thread."""
        ended = profile(f"{self._backend}:{what}", tensors)

        def recorded() -> None:
            try:
                act()
            finally:
                ended()

        return recorded

    def abort(self) -> None:
        """Give up the running operation; whoever waits for it gets an error."""
        if self._arena is not None:
            self._arena.aborted = True
            self._arena.fail()

    @property
    def timeout(self) -> timedelta:
        """The group's timeout; torch changes that of the Gloo group beside this one (`_set_pg_timeout`)."""
        return self._gloo.options._timeout

    def patience(self) -> float:
        """Seconds that the running operation may wait."""
        own = getattr(self._now[2], "timeout", _UNSET)
        return (own if own > timedelta(0) else self.timeout).total_seconds()

    def explained(self, why: str, peers: Sequence[int]) -> Exception:
        """An error that says why these ranks of the arena will not signal any more, and where all ranks are."""
        arena: Any = self._arena
        what, tensors, _ = self._now
        number = arena.board.calls
        places = arena.board.whereabouts()
        there = [arena.names[rank] for rank, (calls, _) in enumerate(places) if calls >= number]
        absent = [rank for rank, (calls, _) in enumerate(places) if calls < number]
        me = f"rank {arena.names[arena.rank]} in {what} #{number}"
        shape = f" of shape {shapes(tensors)}" if tensors else ""
        arrived = f"{ranks_in_words(there)} had arrived"
        failure = ConsequenceError if why == HAS_FAILED else CollectiveError
        if why == HAS_FAILED and absent:
            why = ""  # The failed rank gave up waiting for the same ones.
        if why and peers:
            who = ranks_in_words([arena.names[peer] for peer in peers])
            return failure(f"{who} {why}: {me}{shape} cannot be finished. {arrived[0].upper()}{arrived[1:]}.")
        if why:
            return failure(f"{why}: {me}{shape} cannot be finished")
        late = absent or list(peers)
        lasts = "; ".join(
            f"rank {arena.names[rank]} was last seen in {in_words(places[rank][1])} #{places[rank][0]}" for rank in late
        )
        timed_out = failure(
            f"{me}{shape} of group {self._label or 'default'!s}: Timed out after {arena.waited():.3g} s of waiting for "
            f"{ranks_in_words([arena.names[rank] for rank in late])}; {arrived}. {lasts}."
        )
        timed_out.arrived = there
        return timed_out

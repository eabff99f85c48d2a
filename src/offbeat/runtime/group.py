"""The workers of a run as one group: what they sum, share and wait for together.

Everything that waits here has a deadline. When it passes, the workers call the roll through the rendezvous store, so
that the error names who had not arrived instead of only saying that somebody was late.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.errors import RunError, UsageError, WaitError
from offbeat.protocols.collectives import Collective
from offbeat.protocols.exchanges import Exchanged, sent_by
from offbeat.protocols.schedule import View
from offbeat.runtime.backend import GLOO, CollectiveError, OffbeatGroup, open_group
from offbeat.runtime.choices import Sums
from offbeat.runtime.execute import Program, run
from offbeat.runtime.place import Place
from offbeat.runtime.presence import Presence, Waiting

_WAITED_FOR = AllreduceOptions()
_WAITED_FOR.asyncOp = False
_COUNTED = 4096
"""Exchanges whose bytes are remembered; sizes that differ each time must not fill the memory."""
ROLL_CALL = timedelta(seconds=2)
"""How long a worker whose deadline has passed waits to hear which others are stuck at the same place."""


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Return when it is complete; raise a WaitError that names the missing when its deadline has passed."""
        ...


class Sent:
    """Bytes that a worker has sent, over all lanes."""

    def __init__(self) -> None:
        self.counted = 0
        """By the exchanges of the run."""
        self.measuring = 0
        """By exchanges that were only made to measure what they take."""


class Group:
    """The workers of one run; of size 1 it needs no network and every exchange is the identity."""

    def __init__(self, place: Place, timeout: timedelta, device: torch.device) -> None:
        self.rank = place.rank
        self.size = place.size
        self.timeout = timeout
        self.one_host = place.local_size == place.size
        self.outside = False
        """Whether this worker is on its way into a run that the others have begun: it agrees on things with itself."""
        self._sent = Sent()
        self._counted: dict[tuple[Any, ...], tuple[Exchanged, int]] = {}
        self._recorded: list[Exchanged] | None = None
        self._lanes = [0]
        self._lane = 0
        self._calls = 0
        self._number = 0
        self._store: Any = None
        self._all = [self]
        self.presence: Presence | None = None
        """Where the workers are, so that a wait for one that has left is noticed; None alone."""
        self._watched: Any = SimpleNamespace(waiting=None)
        self._owns_default = False
        self._opened: list[Any] = []
        self._process_group: Any = None
        self._view: View | None = None
        self.sums_by: Sums | None = None
        """The algorithm that was chosen; None: the process group's own."""
        self._backend = "offbeat" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        if self.size > 1:
            self._connect(place)
            self._attend(lambda: {str(lane._lane): lane._calls for lane in self._all})

    def _attend(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Tell the others where this worker is, over a line of its own: a thread must not wait for another's answer."""
        line = dist.PrefixStore(f"offbeat/team/{self._number}", self._store.clone())
        self.presence = Presence(line, self.rank, self.size, counts)
        self.presence.break_off = self._break_off
        self._watched = self.presence

    def _break_off(self, error: WaitError) -> None:
        """End waits in shared memory; those inside of Gloo end with the process."""
        del error  # It is the presence's verdict.
        for opened in {self._process_group, *self._opened}:
            if isinstance(opened, OffbeatGroup):
                opened.abort()

    def leave(self) -> None:
        """Say that this worker has done its last step, and wait until all others have: a team ends together."""
        if self.presence is not None:
            self.presence.leave()
            self.presence.await_others(self.timeout.total_seconds())

    def depart(self, failed: bool) -> None:
        """Say that nothing more will come from this worker, so that nobody waits for it."""
        if self.presence is not None:
            self.presence.gone(failed)

    def _meet_at(self, place: Place) -> None:
        """Find the store."""
        store, rank, _ = next(
            iter(dist.rendezvous(_meeting_point(place), place.rank, place.size, timeout=self.timeout))
        )
        store.set_timeout(self.timeout)
        # The store may outlive a team: the next one in the same processes must not find this one's addresses.
        self._store, self._number = store, store.add(f"offbeat/teams/{rank}", 1)

    def _connect(self, place: Place) -> None:
        if dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            self._number = self._store.add(f"offbeat/teams/{self.rank}", 1)
            self._process_group = self._another()
            return
        try:
            self._meet_at(place)
            store, rank, size = self._store, self.rank, self.size
            meeting = dist.PrefixStore(f"offbeat/team/{self._number}", store)
            dist.init_process_group(self._backend, store=meeting, rank=rank, world_size=size, timeout=self.timeout)
        except (RuntimeError, ValueError) as error:
            raise WaitError(
                f"worker {self.rank} could not meet the other {self.size - 1} at {place.address}:{place.port} within "
                f"{self.timeout.total_seconds():g} s: {error}. Check that all workers were started and reach that "
                f"address."
            ) from error
        self._owns_default = True
        self._process_group = dist.group.WORLD

    def _another(self) -> Any:
        """The same workers once more."""
        self._lanes[0] += 1
        if self._backend == "offbeat":
            # Unknown to torch, so that a script may destroy torch's groups while the team goes on.
            meeting = dist.PrefixStore(f"offbeat/group/{self._number}/{self._lanes[0]}", self._store)
            label = f"team {self._number}.{self._lanes[0]}"
            opened: Any = open_group(meeting, self.rank, self.size, self.timeout, label=label)
        else:
            opened = dist.new_group(backend=self._backend, timeout=self.timeout)
        self._opened.append(opened)
        return opened

    def lane(self) -> Group:
        """The same workers over connections of their own: exchanges there need keep no order with those here.

        All workers open their lanes in the same order.
        """
        if self.size == 1:
            return self
        lane = copy.copy(self)
        lane._calls = 0
        lane._owns_default = False
        lane._process_group = self._another()
        lane._lane = self._lanes[0]
        self._all.append(lane)
        return lane

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this worker has sent, over all lanes."""
        return self._sent.counted

    @property
    def bytes_measuring(self) -> int:
        """What was sent beside that, only to measure what exchanges take."""
        return self._sent.measuring

    @contextmanager
    def measuring(self) -> Generator[None]:
        """Inside, exchanges count as measurements: they are no part of a step, nor of what the run has sent."""
        before, recorded = self._sent.counted, self._recorded
        self._recorded = None
        try:
            yield
        finally:
            self._recorded = recorded
            self._sent.measuring += self._sent.counted - before
            self._sent.counted = before

    def count_as_measuring(self, nbytes: int) -> None:
        """Count what was sent to measure outside of this group."""
        self._sent.measuring += nbytes

    def record(self) -> None:
        """From now on, remember what is exchanged over this lane."""
        self._recorded = []

    def recorded(self) -> tuple[Exchanged, ...]:
        """What was exchanged since, and remember no more."""
        recorded, self._recorded = self._recorded, None
        return tuple(recorded or ())

    def note(self, what: str, nbytes: int, itemsize: int = 1, by: str | None = None, root: int = 0) -> None:
        """Count an exchange by the schedule that runs; without a name, by that of the process group's own algorithm."""
        key = (what, nbytes, itemsize, by, root)
        known = self._counted.get(key)
        if known is None:
            known = self._costed(*key)
        self._sent.counted += known[1]
        if self._recorded is not None:
            self._recorded.append(known[0])

    def _costed(self, what: Any, nbytes: int, itemsize: int, by: str | None, root: int) -> tuple[Exchanged, int]:
        group, named = self._process_group, by
        if by is None:
            own = isinstance(group, OffbeatGroup)
            by = group.algorithm(Collective(what), nbytes) if own else GLOO[Collective(what)]
        exchanged = Exchanged(what=what, by=by, nbytes=nbytes, itemsize=itemsize, root=root)
        if len(self._counted) >= _COUNTED:
            self._counted.clear()
        found = exchanged, sent_by(*exchanged.part(self.size), self.view, self.rank)
        self._counted[what, nbytes, itemsize, named, root] = found
        return found

    @property
    def calls(self) -> int:
        """How often this worker has exchanged something with all others: in step they have all done so as often."""
        return self._calls

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the workers that take part."""
        return tuple(range(self.size))

    @property
    def present(self) -> tuple[int, ...]:
        """Who took part in the last exchange."""
        return self.members

    @property
    def awaited(self) -> bool:
        """Whether anybody waits to join."""
        return False

    def knock(self) -> None:
        """Wait until the others let this worker in."""

    def come_in(self) -> None:
        """Meet the others from now on: this worker is where they are."""

    def admit(self) -> None:
        """Let in those who wait to join; all workers call this together."""

    def leader(self) -> int:
        """The rank of the one who does what only one does, agreed by all; all workers call this together."""
        return 0

    @property
    def leads(self) -> bool:
        """Whether this worker does what only one does: writes, tells, concludes."""
        return self.rank == 0

    def check(self) -> None:
        """Raise if this worker takes part no longer: the others have gone on without it."""

    def tell_of_changes(self, told: Callable[[Sequence[int]], None]) -> None:
        """Have this called, in any thread, when other workers take part than before, with the ranks of those gone.

        It never is in most runs: they end with the first death.
        """

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Torch's own group underneath, for those who build on it; None alone."""
        return self._process_group

    def stock(self) -> dist.ProcessGroup:
        """The same workers in a group as torch makes it by itself, on Gloo or NCCL; all workers open it together."""
        backend = "gloo" if self._backend == "offbeat" else self._backend
        opened: Any = dist.new_group(backend=backend, timeout=self.timeout)
        self._opened.append(opened)
        return opened

    @property
    def shares_memory(self) -> bool:
        """Whether all workers live on one host and can read each other's memory."""
        return isinstance(self._process_group, OffbeatGroup) and self._process_group.local is not None

    def sum_by(self, name: str, stored: Path | None = None) -> Sums:
        """From now on, sum by this algorithm; `auto` measures all of them, or takes what is `stored`."""
        if not isinstance(self._process_group, OffbeatGroup):
            raise UsageError(f"algorithms can be chosen for workers on CPUs; here {self._backend} sums by its own ways")
        self.sums_by = Sums(self._process_group, name, stored)
        return self.sums_by

    def at_once(self, act: Callable[[OffbeatGroup], None], what: str, tensors: Sequence[Tensor] = ()) -> None:
        """Let `act` use the group's shared memory; every worker calls this with the same."""
        self._calls += 1
        self._watched.waiting = Waiting(what, str(self._lane), self._calls)
        try:
            self._process_group.at_once(act, what, tensors)
        except RuntimeError as error:
            raise self.explained(error, what, self._calls) from error
        finally:
            self._watched.waiting = None

    @property
    def view(self) -> View:
        """Who takes part in schedules, and on which host each lives, as far as it is known."""
        if self._view is None:
            group = self._process_group
            hosts = group.hosts.of if isinstance(group, OffbeatGroup) else None
            self._view = View.of(self.size, hosts)
        return self._view

    def run(self, program: Program, row: Tensor, scratch: Tensor, what: str, mixed: Exchanged | None = None) -> None:
        """Do this worker's part of a schedule over single messages, in place; every worker calls this with its own.

        `mixed` is what that is in a step, if it is a part of one.
        """
        self._sent.counted += program.sent * row.element_size()
        if self._recorded is not None and mixed is not None:
            self._recorded.append(mixed)

        def do(messages: Any) -> None:
            run(program, row, messages, scratch=scratch)

        def act(group: Any) -> Any:
            if isinstance(group, OffbeatGroup):
                return group.later(lambda: do(group.messages), what, [row])
            do(group)
            return _DONE

        self._started(act, what).wait()

    def start_sum(self, tensor: Tensor, what: str) -> Pending:
        """Begin to replace `tensor`, on every worker, by its sum over the workers."""
        return _DONE if self.size == 1 else self._start_sum(tensor, what, AllreduceOptions())

    def _start_sum(self, tensor: Tensor, what: str, options: AllreduceOptions) -> Pending:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        sums, nbytes, itemsize = self.sums_by, real.nbytes, real.itemsize
        if sums is None:
            self.note("all_reduce", nbytes, itemsize)
            return self._started(lambda group: group.allreduce([real], options), what)
        work = self._started(lambda group: group.later(lambda: sums.sum(real), what, [real]), what)
        # Which algorithm it was may be found out by the sum itself.
        work.then = lambda: self.note("all_reduce", nbytes, itemsize, sums.algorithm(nbytes))
        return work

    def sum(self, tensor: Tensor, what: str = "a sum") -> Tensor:
        """`tensor` summed over the workers, in place."""
        if self.size > 1:
            self._start_sum(tensor, what, _WAITED_FOR).wait()
        return tensor

    def mean(self, tensor: Tensor, what: str, weight: float | None = None) -> Tensor:
        """`tensor` averaged over the workers, in place; by their weights, if they have any and not all are 0."""
        if weight is None:
            return self.sum(tensor, what).div_(self.size)
        total = float(self.gather([weight], what).sum())
        return self.sum(tensor.mul_(weight / total if total else 1 / self.size), what)

    def sums(self, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Named tensors, each summed over the workers; one exchange for each kind of number."""
        result = {name: value.detach().clone() for name, value in tensors.items()}
        kinds = sorted({value.dtype for value in result.values()}, key=str)
        for kind in kinds:
            names = [name for name in sorted(result) if result[name].dtype == kind]
            flat = torch.cat([result[name].reshape(-1) for name in names])
            self.sum(flat, what)
            for name, piece in zip(names, flat.split([result[name].numel() for name in names]), strict=True):
                result[name] = piece.view(result[name].shape)
        return result

    def sum_sparse(self, tensor: Tensor, what: str) -> Tensor:
        """A sparse tensor summed over the workers."""
        if self.size == 1:
            return tensor
        total = tensor.coalesce()
        self.note("all_gather", total.values().nbytes + total.indices().nbytes, by=GLOO[Collective.ALL_GATHER])
        self._started(lambda group: group.allreduce([total]), what).wait()
        return total

    def share(self, tensor: Tensor, what: str = "a broadcast", root: int = 0) -> Tensor:
        """`tensor` of worker `root`, on every worker, in place."""
        if self.size > 1 and tensor.numel():
            self.note("broadcast", tensor.nbytes, root=root)
            held = tensor if tensor.is_contiguous() else tensor.contiguous()
            options = dist.BroadcastOptions()
            options.rootRank = root
            # As bytes, because backends do not know every kind of number.
            raw = held.reshape(-1).view(torch.uint8)
            self._started(lambda group: group.broadcast([raw], options), what).wait()
            if held is not tensor:
                tensor.copy_(held)
        return tensor

    def gather(self, values: Sequence[float], what: str) -> Tensor:
        """A row of numbers from every worker, as a float64 matrix with one row per worker."""
        table = torch.zeros(self.size, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        return self.sum(table, what)

    def letters(self, letter: Tensor, fixed: bool, what: str) -> list[Tensor]:
        """A row of bytes from every worker, by rank; `fixed` if all are of one length."""
        if self.size == 1:
            return [letter]
        lengths = [letter.numel()] * self.size
        if not fixed:
            lengths = [int(length) for length in self.gather([float(letter.numel())], what)[:, 0]]
        longest = max(lengths)
        # Gloo gathers rows of one length only.
        sizes = lengths if self.shares_memory else [longest] * self.size
        given = torch.nn.functional.pad(letter, (0, sizes[self.rank] - letter.numel()))
        self.note("all_gather", given.numel())
        outputs = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        if longest:
            self._started(lambda group: group.allgather([outputs], [given]), what).wait()
        return [output[:length] for output, length in zip(outputs, lengths, strict=True)]

    def barrier(self, what: str = "a barrier") -> None:
        """Return when every worker has called this."""
        self.sum(torch.zeros(1), what)

    def _started(self, start: Callable[[Any], Any], what: str) -> _Work:
        self._calls += 1
        begun = _Work(self, what, self._calls)
        begun.work = begun.watched(lambda: start(self._process_group))
        return begun

    def explained(self, error: RuntimeError, what: str, number: int) -> RunError:
        """What went wrong in words: who had not arrived, or whose connection broke."""
        if self.presence is not None and self.presence.verdict is not None:
            return self.presence.verdict
        text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        place = f"worker {self.rank} in {what} (exchange {number})"
        if isinstance(error, CollectiveError) and "imed out" not in text:
            return WaitError(f"{place}: {text}")  # It says itself who has died, or what the others have called.
        if "imed out" not in text and "timeout" not in text.lower():
            return WaitError(f"{place} lost its connection to another worker, which has most likely died: {text}")
        missing = self._roll_call(number)
        who = (
            f"worker{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            if missing
            else "nobody in particular"
        )
        return WaitError(
            f"{place} waited {self.timeout.total_seconds():g} s for {who}. Look at the log of whoever is missing, "
            f"or, if such a wait is normal for this program, allow more with --timeout."
        )

    def _roll_call(self, number: int) -> list[int]:
        store = dist.PrefixStore(f"offbeat/late/{self._number}/{self._lane}/{number}", self._store)
        absent = [rank for rank in range(self.size) if rank != self.rank]
        try:
            store.set(str(self.rank), "here")
            deadline = time.monotonic() + ROLL_CALL.total_seconds()
            while absent and time.monotonic() < deadline:
                absent = [rank for rank in absent if not store.check([str(rank)])]
                time.sleep(0.05)
        except RuntimeError:
            return []  # The store went away with its host: nobody is left to ask.
        return absent

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on counting from."""
        return {"bytes_sent": self.bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._sent.counted = int(state["bytes_sent"])

    def close(self) -> None:
        """Leave the group, if it was opened here."""
        if self.presence is not None:
            self.presence.close()
        for opened in self._opened:
            if isinstance(opened, OffbeatGroup):
                opened.shutdown()
            elif dist.is_initialized() and not self._owns_default:
                dist.destroy_process_group(opened)
        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()
        self._opened.clear()
        self._owns_default = False
        self._process_group = None


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


_DONE = _Done()


class _Work:
    spare = 0

    def __init__(self, group: Group, what: str, number: int) -> None:
        self._group, self.what, self.number = group, what, number
        self._presence = group._watched  # pyright: ignore[reportPrivateUsage]
        self.work: Any = None
        self.then: Callable[[], None] | None = None
        """Called when it is done."""

    @property
    def lane(self) -> str:
        return str(self._group._lane)  # pyright: ignore[reportPrivateUsage]

    def wait(self) -> None:
        """Wait for torch's work, and explain its failure."""
        self.watched(self.work.wait)
        if self.then is not None:
            self.then()
            self.then = None

    def watched(self, act: Callable[[], Any]) -> Any:
        """Do something that may wait for the others."""
        self._presence.waiting = self
        try:
            return act()
        except RuntimeError as error:
            raise self._group.explained(error, self.what, self.number) from error
        finally:
            self._presence.waiting = None


def _meeting_point(place: Place) -> str:
    # env:// lets torch join a store that the launcher already serves; Slurm has no such server, so rank 0 opens one.
    return "env://" if place.launcher == "torchrun" else f"tcp://{place.address}:{place.port}"

"""Bundles of tensors between the stages of a replica: receives are posted early, and sends are not waited for.

A bundle is what crosses from one part of the model to a stage for one microbatch. Shapes may differ from batch to
batch. Most of the time they are those of the last time for an input of the same shapes: tensors of these shapes are
then already being received. Where they are not, a mark on the first message says so, and a header with the shapes goes
ahead of the tensors. Between hosts messages have no marks, so there a header goes with every bundle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import RunError, WaitError
from offbeat.runtime.backend._fast_path import DONE
from offbeat.runtime.backend._point_to_point import MessageWork
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.run.stopwatch import Stopwatch

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
_DIMENSIONS = 8
_ROW = 2 + _DIMENSIONS
_TAGS = 3
"""Tags of each bundle: of a header, of tensors as expected, and of tensors of other shapes."""

Form = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def form_of(tensor: Tensor) -> Form:
    """The dtype and shape of a tensor."""
    return tensor.dtype, tuple(tensor.shape)


class IncomingBundle:
    """A bundle that is being received."""

    def __init__(self, bundles: Bundles, peer: int, tag: int, what: object, count: int, key: Hashable) -> None:
        self._bundles, self._peer, self._tag, self._what, self._key = bundles, peer, tag, what, key
        self._count, self._expected = count, bundles.expected(key)
        self._header = self._post_header() if self._expected is None or not bundles.marks else None
        self._tensors, self._works = self._post(self._expected or (), tag + 1)

    def wait(self) -> list[Tensor]:
        """The tensors, when they have come."""
        finish = self._bundles.finish
        for work in self._works:
            finish(work, self._peer, self._what)
        if self._header is None:
            if not self._works[0].mark:
                return self._tensors
            self._header = self._post_header()  # They are not what was expected.
        header, work = self._header
        finish(work, self._peer, self._what)
        forms = tuple(map(_read, header.tolist()))
        if forms == self._expected:
            return self._tensors
        self._bundles.note(self._key, forms)
        tensors, works = self._post(forms, self._tag + 2)
        for work in works:
            finish(work, self._peer, self._what)
        return tensors

    def _post_header(self) -> tuple[Tensor, Any]:
        header = torch.zeros(self._count, _ROW, dtype=torch.int64)
        return header, self._bundles.receive(header, self._peer, self._tag)

    def _post(self, forms: Sequence[Form], tag: int) -> tuple[list[Tensor], list[Any]]:
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in forms]
        return tensors, [self._bundles.receive(tensor, self._peer, tag) for tensor in tensors]


class ReturningGradients:
    """Gradients that are being received: they have the shapes of what was sent, so no header goes ahead of them."""

    def __init__(self, bundles: Bundles, peer: int, tag: int, what: object, forms: Sequence[Form]) -> None:
        self._bundles, self._peer, self._what = bundles, peer, what
        self._tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in forms]
        self._works = [bundles.receive(tensor, peer, tag) for tensor in self._tensors]

    def wait(self) -> list[Tensor]:
        """The gradients, when they have come."""
        for work in self._works:
            self._bundles.finish(work, self._peer, self._what)
        return self._tensors


class Bundles:
    """One worker's messages to and from the other stages of its replica; peers are stages."""

    def __init__(self, group: DirectGroup, stopwatch: Stopwatch, named: Callable[[int], str]) -> None:
        self._messages: Any = group.process_group.messages
        self.marks: bool = self._messages.marks
        """Whether a message can say that it is not what was expected."""
        self._group, self._stopwatch, self._named = group, stopwatch, named
        self._forms: dict[Hashable, tuple[Form, ...]] = {}
        self._new: dict[Hashable, tuple[Form, ...]] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._earlier: deque[tuple[Any, Tensor]] = deque()

    def expected(self, key: Hashable) -> tuple[Form, ...] | None:
        """What came or was sent under this key in an earlier step; both ends know the same."""
        return self._forms.get(key)

    def note(self, key: Hashable, forms: tuple[Form, ...]) -> None:
        """What was sent or came; expected from the next step on, as receives of this one may have been posted."""
        self._new.setdefault(key, forms)

    def end_step(self) -> None:
        """All bundles of a step have come or were sent."""
        self._forms.update(self._new)
        self._new.clear()
        for work, _ in self._earlier:
            work.wait()  # It was sent in the step before.
        self._earlier, self._sent = self._sent, deque()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, key: Hashable) -> None:
        """Start to send a bundle."""
        forms, expected = tuple(map(form_of, tensors)), self.expected(key)
        usual = forms == expected
        if not usual:
            # What the other end already receives must come, for tags and tensors are matched in order.
            for number, (dtype, shape) in enumerate(expected or ()):
                self._start(torch.empty(shape, dtype=dtype), peer, tag * _TAGS + 1, mark=not number)
            self.note(key, forms)
        if not (usual and self.marks):
            self._start(torch.tensor([_row(form) for form in forms], dtype=torch.int64), peer, tag * _TAGS)
        for tensor in tensors:
            self._start(tensor, peer, tag * _TAGS + (1 if usual else 2))

    def post(self, count: int, peer: int, tag: int, what: object, key: Hashable) -> IncomingBundle:
        """Post the receive of a bundle of so many tensors."""
        return IncomingBundle(self, peer, tag * _TAGS, what, count, key)

    def send_back(self, gradients: Sequence[Tensor], peer: int, tag: int) -> None:
        """Start to send gradients, of the shapes of the bundle that they are for."""
        for gradient in gradients:
            self._start(gradient, peer, tag * _TAGS)

    def post_back(self, forms: Sequence[Form], peer: int, tag: int, what: object) -> ReturningGradients:
        """Post the receive of gradients of these forms."""
        return ReturningGradients(self, peer, tag * _TAGS, what, forms)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Post a receive of one tensor."""
        return self._messages.recv(tensor if tensor.numel() else torch.empty(1, dtype=torch.uint8), peer, tag)

    def finish(self, work: Any, peer: int, what: object) -> None:
        """Wait for a receive, at most until the run's deadline."""
        if work is DONE:
            return
        before = self._stopwatch.switch("bubble")
        try:
            work.wait()
        except RuntimeError as error:
            me = self._named(self._group.rank)
            raise WaitError(
                f"{me} waited for {what} from {self._named(peer)}, which did not come: {error} Look at that "
                f"worker's log; the run can be resumed from its last checkpoint."
            ) from error
        finally:
            self._stopwatch.switch(before)

    def _start(self, tensor: Tensor, peer: int, tag: int, mark: bool = False) -> None:
        held = tensor.detach().contiguous() if tensor.numel() else torch.zeros(1, dtype=torch.uint8)
        self._group.sent.add(held.nbytes)
        work = self._messages.send(held, peer, tag, 1) if mark and self.marks else self._messages.send(held, peer, tag)
        if work is DONE:
            return
        # The memory must stay until the message has left.
        self._sent.append((work, held))
        while self._sent and _is_over(self._sent[0][0]):
            self._sent.popleft()


def _is_over(work: Any) -> bool:
    """Whether a send is known to be over; those between hosts only say so when they are waited for."""
    return isinstance(work, MessageWork) and work.is_completed()


def _row(form: Form) -> list[int]:
    dtype, shape = form
    if dtype not in _DTYPES or len(shape) > _DIMENSIONS:
        raise RunError(
            f"a tensor of {dtype} with {len(shape)} dimensions crosses from one stage to another, as only tensors of "
            f"usual types with at most {_DIMENSIONS} dimensions can. Convert it in the model, or cut elsewhere."
        )
    return [_DTYPES.index(dtype), len(shape), *shape, *[0] * (_DIMENSIONS - len(shape))]


def _read(row: Sequence[int]) -> Form:
    return _DTYPES[row[0]], tuple(row[2 : 2 + row[1]])

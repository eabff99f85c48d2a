"""An exception as a message: its text, its traceback, and whether a peer is the likelier cause."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator

from offbeat import errors
from offbeat.runtime.launch._roles import RemoteError

_LONGEST = 200_000

# Gloo raises bare RuntimeErrors: their text is all there is to know them by. Examples:
#   [.../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:38421
#   [.../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete
_GLOO = re.compile(r"\bgloo\b|connection (closed|reset) by peer", re.IGNORECASE)


def describe(error: BaseException, at: float, ours: str) -> RemoteError:
    """The message about an exception, its traceback without the leading frames of the file `ours`."""
    kind = type(error)
    plain = kind.__module__ in ("builtins", "__main__", "offbeat.errors")
    return RemoteError(
        type_name=kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}",
        message=_text(error)[:_LONGEST],
        traceback=_traceback(error, ours)[-_LONGEST:],
        offbeat_class=_offbeat_class(kind),
        communication=any(_is_communication(link) for link in _chain(error)),
        at=at,
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text could not be made: {type(second).__name__})"


def _traceback(error: BaseException, ours: str) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == ours:
        frames = frames.tb_next
    # With no frame of its own, the exception came from ours: then those are what there is to show.
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _offbeat_class(kind: type[BaseException]) -> str | None:
    for ancestor in kind.__mro__:
        if issubclass(ancestor, errors.OffbeatError) and ancestor.__module__ == errors.__name__:
            return ancestor.__name__
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, (errors.WaitError, ConnectionError)):
        return True
    # Only a process that has imported torch.distributed can raise its errors.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and hasattr(distributed, "DistError") and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(_text(error)) is not None

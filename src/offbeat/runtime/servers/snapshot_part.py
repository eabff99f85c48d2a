"""A server's part of snapshots: what it held when it was cut, and what was under way to it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import structs

from offbeat.protocols.colouring import Write
from offbeat.protocols.machine import Done, Payload
from offbeat.protocols.servers.messages import Push, Settings
from offbeat.runtime.messages import Inbox
from offbeat.runtime.state.snapshots import Kept, draft_of, write_shard


class Scribe:
    """Keeps copies when it is told to, and writes them down in a thread."""

    def __init__(self, checkpoints: Path, inbox: Inbox) -> None:
        self._checkpoints, self._inbox = checkpoints, inbox
        self._state = b""
        self._kept: list[Kept] = []

    def record(self, state: bytes) -> None:
        """The server is cut here: this is what it holds."""
        self._state, self._kept = state, []

    def keep(self, push: Push, payload: Payload, settings: Settings) -> None:
        """A push was under way. It says only what has changed of the settings: kept by itself it must say all."""
        numbers = None if payload.handle is None else np.array(payload.handle)
        self._kept.append((structs.replace(push, settings=push.settings or settings), numbers))

    def write(self, work: Write, token: Any) -> Literal[False]:
        """Write it all down; the machine hears of it when that is done."""
        (state, self._state), (kept, self._kept) = (self._state, b""), (self._kept, [])
        threading.Thread(target=self._write, args=(work, token, state, kept), daemon=True).start()
        return False

    def _write(self, work: Write, token: Any, state: bytes, kept: list[Kept]) -> None:
        try:
            write_shard(draft_of(self._checkpoints, work.colour), work.cut, state, kept)
        except OSError as error:
            print(f"a snapshot could not be written: {error}", file=sys.stderr, flush=True)
            return
        self._inbox.put(Done(token, True))

"""A server's part of snapshots: what it held when it was cut, and what was under way to it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from offbeat.protocols.colouring import Keep, Record, Write
from offbeat.protocols.machine import Done
from offbeat.runtime.messages import Inbox
from offbeat.runtime.servers.numbers import Numbers
from offbeat.runtime.snapshots import Kept, draft_of, write_shard


class Scribe:
    """Keeps copies when it is told to, and writes them down in a thread."""

    def __init__(self, numbers: Numbers, checkpoints: Path, inbox: Inbox) -> None:
        self._numbers, self._checkpoints, self._inbox = numbers, checkpoints, inbox
        self._state = b""
        self._kept: list[Kept] = []

    def do(self, work: Any, token: Any) -> Any:
        """What the machine asks for."""
        match work:
            case Record():
                self._state, self._kept = self._numbers.whole(), []
            case Keep(message=push, payload=payload):
                numbers = None if payload.handle is None else np.array(payload.handle)
                # A push says only what has changed of the settings: kept by itself it must say all of them.
                self._kept.append((structs.replace(push, settings=push.settings or self._numbers.settings()), numbers))
            case Write():
                (state, self._state), (kept, self._kept) = (self._state, b""), (self._kept, [])
                threading.Thread(target=self._write, args=(work, token, state, kept), daemon=True).start()
                return False
            case _:
                pass
        return None

    def _write(self, work: Write, token: Any, state: bytes, kept: list[Kept]) -> None:
        try:
            write_shard(draft_of(self._checkpoints, work.colour), work.cut, state, kept)
        except OSError as error:
            print(f"a snapshot could not be written: {error}", file=sys.stderr, flush=True)
            return
        self._inbox.put(Done(token, True))

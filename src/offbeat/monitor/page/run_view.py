"""One run as the page shows it: verdicts in words, what each process does, how far it is; read again as it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from offbeat.errors import OffbeatError, UsageError
from offbeat.monitor.cpu_wait import read_queues
from offbeat.monitor.deadlocks import Judge
from offbeat.monitor.diagram.waits import FileLane, Names
from offbeat.monitor.page.run_folders import MetricsReader, logs_of, run_of
from offbeat.monitor.page.windows import LaneView
from offbeat.monitor.stragglers import ENOUGH, LATEST, blame
from offbeat.monitor.verdicts import EXIT_CODES
from offbeat.protocols.causality.deadlock import natural
from offbeat.runtime.events.recorder import FOLDER, Reader, Stamp
from offbeat.runtime.run.folder import FINISHED, part, strategy_of
from offbeat.runtime.run.procfs import stat_fields

EVERY: Final = 0.5
"""Seconds between two looks at the files, however many ask."""
RECENT: Final = 10.0
"""Seconds over which steps per second are counted."""
BLAMED: Final = 200_000
"""For each worker all workers' events are gone through to tell who held up whom: so many in all …"""
FEWEST: Final = 48
"""… but at least so many of each, the last ones."""
CURVE: Final = 4000
"""Lines of metrics that are told at once."""
REST: Final = 20.0
"""What takes a second to find out is found out anew after this many, while the run goes."""


class RunView:
    """One run's folder. All methods may be called from several threads."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.metrics = MetricsReader(folder)
        self._lock = threading.RLock()
        self._names = Names()
        self._lanes: dict[Path, tuple[int, FileLane]] = {}
        self._looked = 0.0
        self._changed = True
        self._drawn: LaneView | None = None
        self._drawn_live = False
        self._data: dict[str, Any] = {}
        self._words: list[dict[str, Any]] = []
        self._words_due = 0.0
        self._words_state: str | None = None

    # -- reading ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what is new on disk, if the last look is a while ago."""
        with self._lock:
            if time.monotonic() - self._looked < EVERY:
                return
            self._data = run_of(self.folder) or self._data
            self.metrics.read()
            for path in sorted((self.folder / FOLDER).glob("*.events")):
                self._open(path)
            for _, lane in self._lanes.values():
                self._changed = lane.read() or self._changed
            self._looked = time.monotonic()

    def _open(self, path: Path) -> None:
        """Begin to read a file that is new; a run that is resumed puts another in its place."""
        with suppress(OSError, UsageError):  # It is being made; the next look will find it.
            inode = path.stat().st_ino
            known = self._lanes.get(path)
            if known is None or known[0] != inode:
                self._lanes[path] = (inode, FileLane(_spoken(path.stem), Reader(path, kept=True), self._names))
                self._changed = True

    @property
    def _in_order(self) -> list[FileLane]:
        """Workers first, then servers."""
        by_name = {lane.name: lane for _, lane in self._lanes.values()}
        return sorted((by_name[name] for name in natural(by_name)), key=lambda lane: not lane.name.startswith("worker"))

    @property
    def live(self) -> bool:
        """Whether it goes on, as far as can be seen: it says so, and not all of its processes are gone."""
        lanes = self._in_order
        return self.state == "running" and (not lanes or any(_lives(lane.reader.pid) for lane in lanes))

    @property
    def state(self) -> str:
        """What run.json says."""
        return str(self._data.get("state", "not readable"))

    def lanes(self) -> LaneView:
        """Everything that was read, ready to be drawn."""
        with self._lock:
            self.look()
            live = self.live
            going = live and any(len(lane.open) for lane in self._in_order)
            if self._drawn is None or self._changed or going or live != self._drawn_live:
                self._drawn = LaneView(self._in_order, self._names, time.monotonic() if live else None)
                self._changed, self._drawn_live = False, live
            return self._drawn

    # -- telling ------------------------------------------------------------------------------------------------------

    def told(self, lines: int = 0, epoch: int = 0) -> dict[str, Any]:
        """Everything but the lanes as JSON data; of the metrics what follows on so many lines."""
        with self._lock:
            self.look()
            lanes = self._in_order
            began = [lane.began for lane in lanes if lane.began is not None]
            first = lines if epoch == self.metrics.epoch else 0
            return {
                "name": self.name,
                "folder": str(self.folder),
                "state": self.state if self.live or self.state != "running" else "gone",
                "live": self.live,
                "strategy": strategy_of(self._data),
                "config": part(self._data, "config"),
                "started": part(self._data, "environment").get("started", ""),
                "command": part(self._data, "environment").get("command", []),
                "result": part(self._data, "result"),
                "verdicts": self.verdicts(),
                "processes": [self._process(lane) for lane in lanes] or self._unwatched(),
                "metrics": _thinned(self.metrics.lines[first:]),
                "lines": len(self.metrics.lines),
                "epoch": self.metrics.epoch,
                "events": sum(lane.reader.read for lane in lanes),
                "dropped": sum(lane.reader.dropped for lane in lanes),
                "first": min(began, default=0.0),
                "last": time.monotonic() if self.live else self.lanes().now,
                "logs": logs_of(self.folder),
            }

    def _unwatched(self) -> list[dict[str, Any]]:
        state = "unwatched" if self.state == "running" else "over"
        return [{"name": _spoken(log), "state": state, "step": None} for log in logs_of(self.folder)]

    def _process(self, lane: FileLane) -> dict[str, Any]:
        """What a process does now, or did at last."""
        now = time.monotonic()
        waits = lane.open[np.isfinite(lane.open["waited"])]
        told: dict[str, Any] = {
            "name": lane.name,
            "state": "over",
            "step": lane.stepped,
            "at_least": lane.reader.dropped > 0,
            "events": lane.reader.read,
        }
        if lane.finished:
            return told | {"state": "ended"}
        if not _lives(lane.reader.pid) or not self.live:
            return told | {"state": "gone"} | (self._wait(lane, waits[-1]) if len(waits) else {})
        recent = int((lane.steps > now - RECENT).sum())
        told["steps_per_second"] = recent / min(RECENT, max(0.1, now - (lane.began or now)))
        if not len(waits):
            return told | {"state": "computing"}
        return told | {"state": "waiting", "seconds": now - float(waits[-1]["waited"])} | self._wait(lane, waits[-1])

    def _wait(self, lane: FileLane, wait: Any) -> dict[str, Any]:
        channel, sequence = int(wait["channel"]), int(wait["sequence"])
        others = {other.name: other.entered for other in self._in_order if other is not lane}
        members = [name for name in self._names.channels[channel].members if name != lane.name]
        late = [name for name in members if others.get(name, {}).get(channel, 0) < sequence]
        return {"waits_in": self._names.labels[int(wait["label"])].numbered(sequence), "waits_for": late}

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def verdicts(self) -> list[dict[str, Any]]:
        """What is to be said of the run, the worst first, in words: `kind`, `level` (good, fair, bad), `message`."""
        with self._lock:
            changed = self.state != self._words_state
            if changed or (self.live and time.monotonic() > self._words_due):
                start = time.monotonic()
                self._words_state = self.state
                self._words = self._find_words()
                self._words_due = start + max(2.0, REST * (time.monotonic() - start))
            return self._words

    def _find_words(self) -> list[dict[str, Any]]:
        verdict = part(self._data, "verdict") or self._judged()
        found = [_said(verdict["kind"], "bad", verdict["message"], verdict.get("stacks", {}))] if verdict else []
        if not found and self.state in ("failed", "interrupted"):
            why = "It failed; the error is in the logs." if self.state == "failed" else "It was interrupted."
            found.append(_said(self.state, "bad" if self.state == "failed" else "fair", why))
        if not found and self.state == "running" and not self.live:
            found.append(_said("gone", "bad", "It says that it runs, but no process of it lives: it was killed."))
        if not self._lanes:
            return [*found, _said("unwatched", "fair", _UNWATCHED)]
        found += self._stragglers()
        if not found:
            words = "Nobody waits in vain so far." if self.live else "Nobody waited in vain."
            found.append(_said("healthy", "good", words))
        return found

    def _judged(self) -> Mapping[str, Any]:
        """What the events say of a run whose launcher has said nothing, because it was killed."""
        if "verdict" in self._data or self.live or self.state in FINISHED:
            return {}
        judge = Judge()
        for path in self._worker_files():
            reader = Reader(path, kept=True)
            judge.feed(reader.rank, reader.new())
        for path in self._lanes:
            if path not in self._worker_files() and path.exists():
                judge.feed_server(Reader(path, kept=True).new())
        found = judge.final()
        return {} if found is None else found.plain()

    def _stragglers(self) -> list[dict[str, Any]]:
        # Nobody can have cost the others much who is seldom the last: then comparing can be saved.
        if not self.lanes().often_last(1 / (4 * max(1, len(self._worker_files()))), ENOUGH):
            return []
        files = self._worker_files()
        each = min(LATEST, max(FEWEST, BLAMED // len(files) ** 2))
        with suppress(OffbeatError, ValueError):  # What is written over at this moment can be told at the next.
            latest = {reader.rank: _latest(reader, each) for reader in map(Reader, files)}
            found = blame(latest, queues=read_queues(self.folder))
            return [_said("straggler", "fair", f"{one}") for one in found if one.straggler]
        return []

    def _worker_files(self) -> list[Path]:
        return [path for path in self._lanes if path.stem.startswith("worker-") and path.exists()]


_UNWATCHED: Final = (
    "This run was not watched: its processes have written no events. Start it with `offbeat run --watch` to see who "
    "waits for whom."
)


def _said(kind: str, level: str, message: str, stacks: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {
        "kind": kind,
        "level": "fair" if kind == "silent" else level,
        "message": message,
        "stacks": dict(stacks or {}),
        "exit_code": EXIT_CODES.get(kind),
    }


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Not more lines than a chart has pixels for; the last is always there."""
    stride = -(-len(lines) // CURVE)
    return lines if stride <= 1 else lines[::-1][::stride][::-1]


def _latest(reader: Reader, count: int) -> list[Stamp]:
    reader.read = max(0, reader.written - count)
    return reader.new()


def _spoken(stem: str) -> str:
    """`worker-3` as it is said."""
    return stem.replace("-", " ")


def _lives(process: int) -> bool:
    return bool(stat_fields(process))

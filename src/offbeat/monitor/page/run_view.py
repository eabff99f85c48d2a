"""One run as the page shows it: lanes, verdicts, the state of each process; read again while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from offbeat.errors import OffbeatError, UsageError
from offbeat.monitor.cpu_wait import read_queues
from offbeat.monitor.deadlocks import Judge
from offbeat.monitor.diagram.intervals import KINDS, CallGroups, Window, computations, intervals
from offbeat.monitor.diagram.waits import FileLane, Lane, Names, Table, joined
from offbeat.monitor.page.federated_rounds import round_rows
from offbeat.monitor.page.run_folders import MetricsReader, logs_of, run_of
from offbeat.monitor.stragglers import ENOUGH, LATEST, blame
from offbeat.monitor.verdicts import EXIT_CODES
from offbeat.protocols.causality.deadlock import natural
from offbeat.runtime.events.machines import FILE as MACHINES
from offbeat.runtime.events.machines import MachineRecord, machines_of
from offbeat.runtime.events.recorder import FOLDER, Reader, Stamp
from offbeat.runtime.federated.round_log import ROUNDS_FILE
from offbeat.runtime.run.folder import FINISHED, part, strategy_of
from offbeat.runtime.run.procfs import stat_fields

EVERY: Final = 0.5  # Seconds between two looks at the files, however many clients ask.
FRESH: Final = 15.0  # Seconds after which a machine that was not heard from counts as gone.
RECENT: Final = 10.0  # Seconds over which steps per second are counted.
BLAMED: Final = 200_000  # To find stragglers, all events are examined once for each worker: at most this many …
FEWEST: Final = 48  # … but at least this many of each, the last ones.
CURVE: Final = 4000  # Maximum number of lines of metrics that are sent at once.
REST: Final = 20.0  # Verdicts that take a second to find are updated after this many seconds, while the run goes on.
TAIL: Final = 0.03  # Stuck calls are drawn this share of the whole beyond the last event: their end is unknown.
MOST_STEPS: Final = 4000  # Maximum number of steps that are marked one by one.
_COLUMNS: Final = ("call", "sequence", "count", "share", "label", "lane", "kind")
"""The columns after starts and lengths; as in common.js."""
_UNWATCHED: Final = (
    "This run was not watched: its processes have recorded no events. Start it with `offbeat run --monitor` to see who "
    "waits for whom."
)


class LaneView:
    """All intervals of a run at one moment."""

    def __init__(
        self, lanes: Sequence[Lane], names: Names, now: float | None, homes: Mapping[str, str] | None = None
    ) -> None:
        """`now` is the current time if the run is still going, None if it is over; `homes` are lanes' machines."""
        self.names = [lane.name for lane in lanes]
        self.machines = [(homes or {}).get(name, "") for name in self.names] if homes else []
        self.labels = names.labels
        self.start = min((lane.began for lane in lanes if lane.began is not None), default=0.0)
        self.stop = max((lane.last for lane in lanes if lane.began is not None), default=0.0)
        tail = TAIL * (self.stop - self.start) if any(len(lane.open) for lane in lanes) else 0.0
        self.now = self.stop + tail if now is None else max(now, self.stop)  # End of what is drawn.
        self.steps = [lane.steps for lane in lanes]
        self.extents = [
            (lane.began or 0.0, self.now if now is not None and not lane.finished else lane.last) for lane in lanes
        ]
        calls = CallGroups(joined(lanes), names, self.names)
        self.intervals = np.concatenate([intervals(calls, self.now, now is not None), computations(lanes)])
        self.last_in = np.bincount(calls.stays["lane"][calls.decisive], minlength=len(lanes))
        """Number of calls that each lane was the last to enter."""
        self._window = Window(self.intervals, len(lanes))

    def often_last(self, share: float, calls: int) -> list[str]:
        """Lanes that were last to enter at least this share of the shared calls, if there were at least `calls`."""
        total = int(self.last_in.sum())
        often = zip(self.names, self.last_in, strict=True)
        return [name for name, count in often if total >= calls and count >= share * total]

    def window(self, start: float, stop: float, pixels: int) -> Table:
        """The intervals between two times, merged to this number of pixels."""
        return np.concatenate(self._window.seen(start, stop, pixels))

    def packed(self, table: Table, start: float, stop: float) -> bytes:
        """Intervals as the page reads them: the length of a head, the head as JSON, then column after column."""
        steps = [own[(own >= start) & (own <= stop)] for own in self.steps]
        head: dict[str, Any] = {
            "start": start,
            "stop": stop,
            "first": self.start,
            "last": self.now,
            "count": len(table),
            "lanes": self.names,
            "machines": self.machines,
            "extents": self.extents,
            "kinds": KINDS,
            "labels": {str(number): self.labels[number][:2] for number in np.unique(table["label"]).tolist()},
            "steps": [own.tolist() for own in steps] if sum(map(len, steps)) <= MOST_STEPS else [],
        }
        text = msgspec.json.encode(head)
        text += b" " * (-(len(text) + 4) % 8)
        columns = [table["start"], table["stop"] - table["start"], *(table[name] for name in _COLUMNS)]
        return b"".join([len(text).to_bytes(4, "little"), text, *(column.tobytes() for column in columns)])


class RunView:
    """One run's folder. All methods may be called from several threads."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.metrics = MetricsReader(folder)
        self._rounds = MetricsReader(folder, ROUNDS_FILE)
        self._lock = threading.RLock()
        self._names = Names()
        self._lanes: dict[Path, tuple[int, FileLane]] = {}
        self._looked = 0.0
        self._changed = True
        self._view: LaneView | None = None
        self._view_live = False
        self._machines: list[MachineRecord] = []
        self._data: dict[str, Any] = {}
        self._verdicts: list[dict[str, Any]] = []
        self._verdicts_due = 0.0
        self._verdicts_state: str | None = None

    # -- reading ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what is new on disk, if the last look is a while ago."""
        with self._lock:
            if time.monotonic() - self._looked < EVERY:
                return
            self._data = run_of(self.folder) or self._data
            self.metrics.read()
            self._rounds.read()
            with suppress(UsageError):
                self._machines = machines_of(self.folder)
            for path in sorted((self.folder / FOLDER).glob("*.events")):
                self._open(path)
            for _, lane in self._lanes.values():
                self._changed = lane.read() or self._changed
            self._looked = time.monotonic()

    def _open(self, path: Path) -> None:
        """Open a file that is new; a resumed run replaces its files."""
        with suppress(OSError, UsageError):  # It is being created; the next look will find it.
            inode = path.stat().st_ino
            known = self._lanes.get(path)
            if known is None or known[0] != inode:
                name, reader = _spoken(path.stem), Reader(path, kept=True)
                reader.shift = sum(machine.shift for machine in self._machines if name in machine.processes)
                self._lanes[path] = (inode, FileLane(name, reader, self._names))
                self._changed = True

    @property
    def _homes(self) -> dict[str, str]:
        """The machine of each process, where there are several."""
        return {process: machine.name for machine in self._machines for process in machine.processes}

    @property
    def _in_order(self) -> list[FileLane]:
        """Machine by machine; on each, workers first, then servers."""
        by_name, homes = {lane.name: lane for _, lane in self._lanes.values()}, self._homes
        machines = [machine.name for machine in self._machines]

        def place(lane: FileLane) -> tuple[int, bool]:
            home = homes.get(lane.name)
            return -1 if home is None else machines.index(home), not lane.name.startswith("worker")

        return sorted((by_name[name] for name in natural(by_name)), key=place)

    def _is_alive(self, lane: FileLane) -> bool:
        """Whether a process lives, as this machine's kernel says, or as far as its own machine is heard from."""
        away = next((machine for machine in self._machines if lane.name in machine.processes), None)
        if away is None or away.comparable:
            return bool(stat_fields(lane.reader.pid))
        with suppress(OSError):
            return time.time() - (self.folder / FOLDER / MACHINES).stat().st_mtime + away.silent < FRESH
        return False

    @property
    def live(self) -> bool:
        """Whether it is still going, as far as can be seen: it says so, and not all of its processes are gone."""
        lanes = self._in_order
        return self.state == "running" and (not lanes or any(map(self._is_alive, lanes)))

    @property
    def state(self) -> str:
        """The state in run.json."""
        return str(self._data.get("state", "not readable"))

    def lanes(self) -> LaneView:
        """All events read so far, ready to be drawn."""
        with self._lock:
            self.look()
            live = self.live
            growing = live and any(len(lane.open) for lane in self._in_order)
            if self._view is None or self._changed or growing or live != self._view_live:
                self._view = LaneView(self._in_order, self._names, time.monotonic() if live else None, self._homes)
                self._changed, self._view_live = False, live
            return self._view

    # -- state --------------------------------------------------------------------------------------------------------

    def summary(self, lines: int = 0, epoch: int = 0) -> dict[str, Any]:
        """Everything but the lanes as JSON data, with the metrics after the first `lines` lines."""
        with self._lock:
            self.look()
            lanes = self._in_order
            environment = part(self._data, "environment")
            metrics = self.metrics.lines[lines if epoch == self.metrics.epoch else 0 :]
            stride = max(1, -(-len(metrics) // CURVE))  # Not more lines than a chart has pixels for.
            return {
                "name": self.name,
                "folder": str(self.folder),
                "state": self.state if self.live or self.state != "running" else "gone",
                "live": self.live,
                "strategy": strategy_of(self._data),
                "config": part(self._data, "config"),
                "started": environment.get("started", ""),
                "command": environment.get("command", []),
                "result": part(self._data, "result"),
                "verdicts": self.verdicts(),
                "machines": [machine.shown() for machine in self._machines],
                "processes": [self._process(lane) for lane in lanes] or self._unwatched(),
                "metrics": metrics[::-1][::stride][::-1],
                "rounds": round_rows(self._rounds.lines),
                "lines": len(self.metrics.lines),
                "epoch": self.metrics.epoch,
                "events": sum(lane.reader.read for lane in lanes),
                "dropped": sum(lane.reader.dropped for lane in lanes),
                "first": min((lane.began for lane in lanes if lane.began is not None), default=0.0),
                "last": time.monotonic() if self.live else self.lanes().now,
                "logs": logs_of(self.folder),
            }

    def _unwatched(self) -> list[dict[str, Any]]:
        state = "unwatched" if self.state == "running" else "over"
        return [{"name": _spoken(log), "state": state, "step": None} for log in logs_of(self.folder)]

    def _process(self, lane: FileLane) -> dict[str, Any]:
        """What a process is doing now, or did last."""
        now = time.monotonic()
        waits = lane.open[np.isfinite(lane.open["waited"])]
        wait = self._wait(lane, waits[-1]) if len(waits) else {}
        dropped, events = lane.reader.dropped, lane.reader.read
        common: dict[str, Any] = {"name": lane.name, "step": lane.stepped, "at_least": dropped > 0, "events": events}
        if lane.finished:
            return common | {"state": "ended"}
        if not self._is_alive(lane) or not self.live:
            return common | {"state": "gone"} | wait
        recent = int((lane.steps > now - RECENT).sum())
        common["steps_per_second"] = recent / min(RECENT, max(0.1, now - (lane.began or now)))
        if not wait:
            return common | {"state": "computing"}
        return common | {"state": "waiting", "seconds": now - float(waits[-1]["waited"])} | wait

    def _wait(self, lane: FileLane, wait: Any) -> dict[str, Any]:
        channel, sequence = int(wait["channel"]), int(wait["sequence"])
        others = {other.name: other.entered for other in self._in_order if other is not lane}
        members = [name for name in self._names.channels[channel].members if name != lane.name]
        late = [name for name in members if others.get(name, {}).get(channel, 0) < sequence]
        return {"waits_in": self._names.labels[int(wait["label"])].numbered(sequence), "waits_for": late}

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def verdicts(self) -> list[dict[str, Any]]:
        """Verdicts on the run, the worst first: `kind`, `level` (good, fair, bad), `message`."""
        with self._lock:
            changed = self.state != self._verdicts_state
            if changed or (self.live and time.monotonic() > self._verdicts_due):
                start = time.monotonic()
                self._verdicts_state = self.state
                self._verdicts = self._find_verdicts()
                self._verdicts_due = start + max(2.0, REST * (time.monotonic() - start))
            return self._verdicts

    def _find_verdicts(self) -> list[dict[str, Any]]:
        verdict = part(self._data, "verdict") or self._from_events()
        verdicts: list[dict[str, Any]] = []
        if verdict:
            verdicts.append(_entry(verdict["kind"], "bad", verdict["message"], verdict.get("stacks", {})))
        elif self.state == "failed":
            verdicts.append(_entry("failed", "bad", "It failed; the error is in the logs."))
        elif self.state == "interrupted":
            verdicts.append(_entry("interrupted", "fair", "It was interrupted."))
        elif self.state == "running" and not self.live:
            words = "Its state is `running`, but none of its processes is alive: it was killed."
            verdicts.append(_entry("gone", "bad", words))
        if not self._lanes:
            return [*verdicts, _entry("unwatched", "fair", _UNWATCHED)]
        verdicts += self._stragglers()
        healthy = "No worker is stuck so far." if self.live else "No worker got stuck."
        return verdicts or [_entry("healthy", "good", healthy)]

    def _from_events(self) -> Mapping[str, Any]:
        """The events' verdict on a run whose launcher left none because it was killed."""
        if "verdict" in self._data or self.live or self.state in FINISHED:
            return {}
        judge = Judge()
        for path in self._worker_files():
            reader = Reader(path, kept=True)
            judge.feed(reader.rank, reader.new())
        for path in self._lanes:
            if path not in self._worker_files() and path.exists():
                judge.feed_server(Reader(path, kept=True).new())
        verdict = judge.final()
        return {} if verdict is None else verdict.plain()

    def _stragglers(self) -> list[dict[str, Any]]:
        files = self._worker_files()
        # A worker that is seldom last cannot have cost the others much: then the comparison is skipped.
        if not self.lanes().often_last(1 / (4 * max(1, len(files))), ENOUGH):
            return []
        each = min(LATEST, max(FEWEST, BLAMED // len(files) ** 2))
        with suppress(OffbeatError, ValueError):  # What is being overwritten now can be read at the next look.
            latest = {reader.rank: _latest(reader, each) for reader in map(Reader, files)}
            workers = blame(latest, queues=read_queues(self.folder))
            return [_entry("straggler", "fair", f"{worker}") for worker in workers if worker.straggler]
        return []

    def _worker_files(self) -> list[Path]:
        return [path for path in self._lanes if path.stem.startswith("worker-") and path.exists()]


def _entry(kind: str, level: str, message: str, stacks: Mapping[str, str] | None = None) -> dict[str, Any]:
    level = "fair" if kind == "silent" else level
    entry = {"kind": kind, "level": level, "message": message, "stacks": dict(stacks or {})}
    return entry | {"exit_code": EXIT_CODES.get(kind)}


def _latest(reader: Reader, count: int) -> list[Stamp]:
    reader.read = max(0, reader.written - count)
    return reader.new()


def _spoken(stem: str) -> str:
    """`worker-3` as `worker 3`."""
    return stem.replace("-", " ")

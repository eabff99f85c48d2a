"""The page's web application: the page itself, its data, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from offbeat.errors import OffbeatError
from offbeat.monitor.page.access import TokenGuard
from offbeat.monitor.page.export import ASSETS, asset, exported
from offbeat.monitor.page.prometheus import CONTENT_TYPE, exposition
from offbeat.monitor.page.run_folders import Folder, log_of
from offbeat.monitor.page.run_view import RunView

TICK: Final = 1.0  # Seconds between two messages to a page.
KEPT_RUNS: Final = 8  # Number of runs kept in memory, the most recently used.
WIDEST: Final = 8192  # Maximum number of pixels of a window.
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Page:
    """Answers requests about one folder of runs."""

    def __init__(self, folder: Folder, chosen: str | None, closing: Callable[[], bool] = lambda: False) -> None:
        self._folder, self._chosen, self._closing = folder, chosen, closing
        self._runs: dict[str, RunView] = {}
        self._lock = threading.Lock()

    def guarded(self, token: str, port: int) -> TokenGuard:
        """The whole application, behind its token."""
        routes = [
            Route("/", self._page),
            Route("/static/{name}", self._static),
            Route("/api/runs", self._list),
            Route("/api/run", self._summary),
            Route("/api/lanes", self._lanes),
            Route("/api/follow", self._follow),
            Route("/api/log", self._log),
            Route("/api/export", self._export),
            Route("/metrics", self._metrics),
        ]
        return TokenGuard(Starlette(routes=routes), token, port)

    def _find(self, request: Request) -> RunView:
        try:
            return self._run(request.query_params.get("run", ""))
        except OffbeatError as error:
            raise HTTPException(404, str(error)) from error

    def _run(self, name: str) -> RunView:
        folder = self._folder.find(name)
        with self._lock:
            run = self._runs.pop(name, None) or RunView(name, folder)
            self._runs[name] = run
            while len(self._runs) > KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
        return run

    # Functions without `async` are called in threads of their own, so reading files delays nobody else.

    def _page(self, _: Request) -> Response:
        return HTMLResponse(asset("page.html"))

    def _list(self, _: Request) -> Response:
        return _json(self._listed())

    def _summary(self, request: Request) -> Response:
        return _json(self._find(request).summary())

    def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404, "There is no such file.")
        return Response(asset(name), media_type=_TYPES[name.rpartition(".")[2]])

    def _listed(self) -> dict[str, Any]:
        briefs = self._folder.briefs()
        newest = briefs[0].name if briefs else None
        return {"folder": str(self._folder.path), "chosen": self._chosen or newest, "runs": briefs}

    def _lanes(self, request: Request) -> Response:
        lanes = self._find(request).lanes()
        start = _float(request.query_params, "start", lanes.start)
        stop = _float(request.query_params, "stop", lanes.now)
        pixels = _float(request.query_params, "pixels", 1000.0)
        if not (start < stop and 1 <= pixels <= WIDEST):
            if lanes.start < lanes.now:
                raise HTTPException(400, f"A window needs start < stop, and 1 to {WIDEST} pixels.")
            stop = start + 1.0
        window = lanes.window(start, stop, int(pixels))
        return Response(lanes.packed(window, start, stop), media_type="application/octet-stream")

    def _log(self, request: Request) -> Response:
        run = self._find(request)
        try:
            return PlainTextResponse(log_of(run.folder, request.query_params.get("of", "")))
        except (OffbeatError, OSError) as error:
            raise HTTPException(404, str(error)) from error

    def _export(self, request: Request) -> Response:
        run = self._find(request)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name)
        return HTMLResponse(exported(run), headers={"content-disposition": f'attachment; filename="{name}.html"'})

    def _metrics(self, _: Request) -> Response:
        """Metrics of the runs in progress and of the chosen run, or else the newest."""
        listed = self._listed()
        names = [run.name for run in listed["runs"] if run.state == "running" or run.name == listed["chosen"]]
        summaries = [self._run(name).summary() for name in names[:KEPT_RUNS]]
        return Response(exposition(summaries), headers={"content-type": CONTENT_TYPE})

    async def _follow(self, request: Request) -> Response:
        run = await asyncio.to_thread(self._find, request)
        lines = int(_float(request.query_params, "lines", 0.0))
        epoch = int(_float(request.query_params, "epoch", 0.0))
        return StreamingResponse(self._news(request, run, lines, epoch), media_type="text/event-stream")

    async def _news(self, request: Request, run: RunView, lines: int, epoch: int) -> AsyncIterator[bytes]:
        """Once a second: the run's state and the list of runs, each if it has changed."""
        last_run: bytes | None = None
        last_list: bytes | None = None
        while not self._closing() and not await request.is_disconnected():
            summary = await asyncio.to_thread(run.summary, lines, epoch)
            lines, epoch = summary["lines"], summary["epoch"]
            text = msgspec.json.encode(summary)
            if text != last_run:
                yield b"event: run\ndata: " + text + b"\n\n"
            runs = msgspec.json.encode(await asyncio.to_thread(self._listed))
            yield b": still here\n\n" if runs == last_list else b"event: runs\ndata: " + runs + b"\n\n"
            last_run, last_list = text, runs
            await asyncio.sleep(TICK)


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def _float(parameters: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(parameters.get(name, default))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name} must be a number.")
    return value

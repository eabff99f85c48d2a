"""The page's HTTP server: on loopback only, in a thread of the process that starts it."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from importlib.util import find_spec
from typing import Any, Final, Self

from offbeat.errors import UsageError
from offbeat.monitor.page.run_folders import Folder

LOOPBACK: Final = "127.0.0.1"
_PATIENCE: Final = 3.0  # Seconds for the thread to end.
HOW_TO_GET: Final = "pip install 'offbeat[watch]'"


def missing() -> bool:
    """Whether the extra that the page needs is not installed."""
    return any(find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client"))


class PageServer:
    """Serves the page from its construction until it is closed."""

    def __init__(self, folder: Folder, chosen: str | None = None, port: int = 0) -> None:
        if missing():
            raise UsageError(f"the page needs starlette, uvicorn and prometheus-client: {HOW_TO_GET}.")
        self._socket = _listening(port)
        self._folder, self._chosen = folder, chosen
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_urlsafe(24)
        self._closing = threading.Event()
        self._server: Any = None
        self._thread = threading.Thread(target=self._serve, name="offbeat page", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Imported in the thread, so that a run need not wait for it.
        import uvicorn

        from offbeat.monitor.page.access import MOST_WAITING, BoundedProtocol
        from offbeat.monitor.page.app import Page

        page = Page(self._folder, self._chosen, self._closing.is_set)
        self._server = uvicorn.Server(
            uvicorn.Config(
                page.guarded(self.token, self.port),
                log_config=None,
                log_level="critical",
                access_log=False,
                lifespan="off",
                http=BoundedProtocol,
                # This many are accepted at once, before any of them can be closed again.
                backlog=MOST_WAITING,
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        if not self._closing.is_set():
            asyncio.run(self._answer())

    async def _answer(self) -> None:
        # A descriptor that is not available is asked for again; a traceback for each would bury the run's output.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        await self._server.serve(sockets=[self._socket])

    @property
    def address(self) -> str:
        """The URL to open in a browser; whoever has it may look."""
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    def wait(self) -> None:
        """Block until it is closed, which from the main thread only Ctrl-C can do."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def close(self) -> None:
        """Stop serving."""
        self._closing.set()
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(_PATIENCE)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(64)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(
            f"port {port} on loopback cannot be used for the page: {error}. Give another with --port, or omit it to "
            f"use a free one."
        ) from error
    return listener

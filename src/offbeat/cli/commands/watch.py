"""`offbeat watch`: the page of runs, served or saved; and the page of a run in progress.

The page's packages are imported when they are used: they are an extra, and `offbeat run` works without.
"""

from __future__ import annotations

import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.options import WatchOptions
from offbeat.errors import OutputError, UsageError
from offbeat.limits import port as check_port

if TYPE_CHECKING:
    from offbeat.monitor.page.http_server import PageServer


def watch(options: WatchOptions) -> None:
    """Serve the page until Ctrl-C and print its address, or save it as a file."""
    check_port("--port", options.port)
    if options.export is not None:
        _export(options.path, options.export)
        return
    from rich.console import Console

    from offbeat.monitor.page.http_server import PageServer
    from offbeat.monitor.page.run_folders import opened

    folder, run = opened(options.path)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    with PageServer(folder, run, options.port) as server:
        console.print(f"The page of {folder.path if run is None else folder.path / run} is at")
        console.print(f"  {server.address}")
        console.print("Ctrl-C ends it; runs are not affected.")
        if options.browser:
            webbrowser.open(server.address)
        with suppress(KeyboardInterrupt):
            server.wait()


def _export(path: Path, file: Path) -> None:
    """Save a run's page as one file; in a directory of runs, the newest run's."""
    from offbeat.monitor.page.export import exported
    from offbeat.monitor.page.run_folders import opened
    from offbeat.monitor.page.run_view import RunView

    folder, run = opened(path)
    name = run or next(iter(folder.runs()), None)
    if name is None:
        raise UsageError(f"{path} has no runs, so there is no page to save. Give a run folder.")
    text = exported(RunView(name, folder.find(name)))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror or error}. Give another file.") from error
    print(f"{file}: the page of {name}, {len(text) / 1e6:.1f} MB. It opens in any browser, without offbeat.")


class LivePage:
    """The page of a run in progress. If it cannot be served, it says why, and the run goes on."""

    def __init__(self, folder: Path) -> None:
        from offbeat.monitor.page.http_server import HOW_TO_GET, PageServer, missing
        from offbeat.monitor.page.run_folders import opened

        self._server: PageServer | None = None
        self.words = f"A page of it needs the extra `watch`: {HOW_TO_GET}."
        """Where the page is, or why there is none."""
        if missing():
            return
        try:
            self._server = PageServer(*opened(folder))
            self.words = f"Watch it at {self._server.address}"
        except Exception as error:
            self.words = f"There is no page of it: {error}"

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

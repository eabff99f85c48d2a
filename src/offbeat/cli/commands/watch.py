"""`offbeat watch`: the page of runs, served or saved; and the page of a run that is under way.

What it needs is imported when it is called.
"""

from __future__ import annotations

import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.errors import OutputError, UsageError
from offbeat.limits import port as check_port

if TYPE_CHECKING:
    from offbeat.monitor.page.http_server import PageServer


def watch(
    path: Annotated[
        Path, typer.Argument(metavar="[RUN|FOLDER]", help="Run folder, or directory of run folders.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="Loopback port; 0 picks a free one.")] = 0,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the run's page, with its data, as one HTML file."),
    ] = None,
) -> None:
    """Serve a local web page of runs, live and finished; only this machine can reach it, with the printed address."""
    check_port("--port", port)
    if export is None:
        serve_page(path, port, open_it)
    else:
        export_page(path, export)


def serve_page(path: Path, port: int, open_it: bool) -> None:
    """Serve the page until Ctrl-C, and say where it is."""
    from rich.console import Console

    from offbeat.monitor.page.http_server import PageServer
    from offbeat.monitor.page.run_folders import opened

    folder, chosen = opened(path)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    with PageServer(folder, chosen, port) as served:
        console.print(f"The page of {folder.path if chosen is None else folder.path / chosen} is at")
        console.print(f"  {served.address}")
        console.print("Ctrl-C ends it; runs do not notice.")
        if open_it:
            webbrowser.open(served.address)
        with suppress(KeyboardInterrupt):
            served.wait()


def export_page(path: Path, file: Path) -> None:
    """Save a run's page as one file; of a folder, the newest run's."""
    from offbeat.monitor.page.export import exported
    from offbeat.monitor.page.run_folders import opened
    from offbeat.monitor.page.run_view import RunView

    folder, chosen = opened(path)
    name = chosen or next(iter(folder.runs()), None)
    if name is None:
        raise UsageError(f"{path} has no runs, so there is no page to write. Give a run's folder.")
    text = exported(RunView(name, folder.find(name)))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror or error}. Give another file.") from error
    print(f"{file}: the page of {name}, {len(text) / 1e6:.1f} MB. It opens in any browser, without offbeat.")


class LivePage:
    """The page of a run under way. Whatever is wrong with it is said, and the run goes on."""

    def __init__(self, folder: Path) -> None:
        from offbeat.monitor.page.http_server import HOW_TO_GET, PageServer, missing
        from offbeat.monitor.page.run_folders import opened

        self._served: PageServer | None = None
        self.words = f"A page of it needs the extra `watch`: {HOW_TO_GET}."
        """Where it is, or why it is not."""
        if missing():
            return
        try:
            self._served = PageServer(*opened(folder))
            self.words = f"Watch it at {self._served.address}"
        except Exception as error:
            self.words = f"There is no page of it: {error}"

    def close(self) -> None:
        """Answer nobody any more."""
        if self._served is not None:
            self._served.close()

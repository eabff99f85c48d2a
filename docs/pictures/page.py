"""Take page.png and page-sick.png: the page of real runs, as Chromium shows it.

Three healthy runs of the digits task, one of them with a worker that pauses now and then; and a program whose workers
wait for each other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from offbeat.errors import VerdictError
from offbeat.monitor.page.http_server import PageServer
from offbeat.monitor.page.run_folders import opened
from offbeat.run.drive import WARM, fit
from offbeat.runtime.launch import Launcher

HERE = Path(__file__).parent
SICK = """\
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, numbers = dist.get_rank(), torch.ones(1000)
for step in range(40):
    time.sleep(0.01 * (1 + (rank == 2)))
    dist.all_reduce(numbers)
if rank == 2:
    dist.recv(numbers, 0)
dist.all_reduce(numbers)
"""


def healthy(folder: Path) -> Path:
    """Make runs to compare; the last is the one shown."""
    run = Path()
    with Launcher(WARM) as launcher:
        for strategy, pause in (
            ("ddp", ()),
            ("server(consistency=ssp(2))", ()),
            ("allreduce", ("worker 1: pause 150ms every 500ms",)),
        ):
            run = fit(
                "offbeat.tasks.digits",
                strategy,
                workers=3,
                target=0.97,
                epochs=8,
                threads=1,
                out=folder,
                watch=True,
                disturb=pause,
                launcher=launcher,
            ).run
    return run


def sick(folder: Path) -> Path:
    """Make a deadlocked run, in its own process."""
    (folder / "train.py").write_text(SICK)
    command = [sys.executable, "-m", "offbeat", "run", "train.py", "--workers", "3", "--monitor"]
    code = subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode
    if code != 10:
        raise VerdictError(f"expected a deadlock, but the run ended with {code}", kind="deadlock", verdict={})
    return (folder / "runs" / "latest").resolve()


def take(browser: Browser, run: Path, picture: str, scheme: str, zoom: tuple[float, float] | None = None) -> None:
    """Take a picture of a run's page; `zoom` is the part of the run to show, as two fractions."""
    with PageServer(*opened(run)) as served:
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)  # pyright: ignore[reportArgumentType]
        page.goto(served.address)
        page.wait_for_selector("#runs tbody tr")
        if zoom is not None:
            page.evaluate(
                "([from, to]) => { const l = offbeat.lanes, w = l.last - l.first;"
                "l.set(l.first + from * w, l.first + to * w); }",
                list(zoom),
            )
        page.wait_for_timeout(1000)
        page.screenshot(path=str(HERE / picture), full_page=True)
        page.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        take(chromium, healthy(Path(here) / "runs"), "page.png", "light")
        take(chromium, sick(Path(here)), "page-sick.png", "dark", (0.8, 1.0))
        chromium.close()

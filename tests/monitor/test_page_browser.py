"""The page in a real browser: a run as it goes and when it is over, zooming, saving, small screens."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser_support import ARGUMENTS, Seen, chromium, until
from cli_support import write
from page_support import run_folder, sums

from conftest import clean_environment
from offbeat.monitor.page.http_server import PageServer
from offbeat.monitor.page.run_folders import opened

pytestmark = pytest.mark.slow

PROGRAM = """\
import time, torch, offbeat
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset

with offbeat.init() as team:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 4)
    model, optimizer, train = team.prepare(model, optimizer, DataLoader(TensorDataset(x, x.sum(1, True)), batch_size=8))
    for epoch in range(5000):
        for inputs, wanted in train:
            time.sleep(0.03 if team.rank == 1 else 0.002)
            optimizer.zero_grad()
            loss = (model(inputs) - wanted).square().mean()
            loss.backward()
            optimizer.step()
        if team.report(accuracy=1 - min(1.0, loss.item()), done=float(Path("stop").exists())):
            break
"""
STEP = "Number(/step (\\d+)/.exec(document.querySelector('.process').textContent)?.[1] || 0)"
PAINTED = """([act, argument]) => new Promise((done) => {
    const lanes = offbeat.lanes;
    lanes.canvas.addEventListener("painted", function seen(event) {
        if (event.detail.answered < lanes.asked) return;
        lanes.canvas.removeEventListener("painted", seen);
        done({ view: lanes.view, count: lanes.data.count, lanes: lanes.data.lanes });
    });
    lanes[act](argument);
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield opened
        opened.close()


@dataclass(frozen=True)
class Going:
    """A run that goes until it is told to stop, and the address of its page."""

    folder: Path
    process: subprocess.Popen[str]
    address: str


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Going]:
    folder = tmp_path_factory.mktemp("going")
    write(folder / "train.py", PROGRAM)
    command = [sys.executable, "-m", "offbeat", "run", "train.py", "--workers", "2", "--monitor", "--target", "done=1"]
    process = subprocess.Popen(command, cwd=folder, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"Watch it at (http://127\.0\.0\.1:\d+/\?token=\S+)", said)):
            line = process.stderr.readline()
            assert line, f"it ended without a page: {said}"
            said += line
        yield Going(folder, process, found[1])
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def page_at(browser: Any, address: str, width: int = 1280, **more: Any) -> tuple[Any, Seen]:
    page = browser.new_context(viewport={"width": width, "height": 900}, **more).new_page()
    seen = Seen(page)
    page.goto(address)
    page.wait_for_selector(".process", timeout=60_000)
    return page, seen


def test_a_run_is_shown_as_it_goes_and_when_it_is_over(browser: Any, going: Going) -> None:
    page, seen = page_at(browser, going.address)
    assert "token" not in page.url
    until(page, f"{STEP} > 0")
    before = page.evaluate(STEP)
    until(page, f"{STEP} > {before}")
    until(page, "document.querySelector('#verdicts').innerText.startsWith('Straggler: worker 1 was last')")
    assert page.locator(".process .name").all_inner_texts() == ["worker 0", "worker 1"]
    until(page, "document.querySelectorAll('#score svg path').length > 0")
    until(page, "offbeat.lanes.data && offbeat.lanes.data.count > 20")
    assert page.is_checked("#follow")
    page.locator(".process").nth(1).click()
    page.wait_for_selector("#log-text:visible")
    origin = going.address.partition("?")[0]
    assert (seen.errors, seen.elsewhere(origin)) == ([], [])

    (going.folder / "stop").touch()
    assert going.process.wait(60) == 0
    page.wait_for_selector("#lost:visible", timeout=30_000)
    assert "offbeat watch" in page.inner_text("#lost")
    assert "Straggler: worker 1" in page.inner_text("#verdicts")
    page.context.close()


@pytest.fixture(scope="module")
def past(going: Going) -> Iterator[str]:
    """The page of that run when it is over, beside one that has failed."""
    (going.folder / "stop").touch()
    going.process.wait(60)
    words = "worker 0 waits for worker 1 in all_reduce #13; worker 1 has ended its program."
    verdict = {"kind": "ended", "message": words, "stacks": {"worker 1": 'File "train.py", line 7'}}
    run_folder(going.folder / "runs" / "20200101-sick", sums(30, end=False), state="failed", verdict=verdict)
    with PageServer(*opened(going.folder / "runs" / "latest")) as served:
        yield served.address


def test_wheel_drag_and_keys_move_the_lanes(browser: Any, past: str) -> None:
    page, seen = page_at(browser, past)
    whole = page.evaluate(PAINTED, ["all", None])
    assert whole["lanes"] == ["worker 0", "worker 1"]
    assert whole["count"] > 100

    def view() -> list[float]:
        until(page, "!offbeat.lanes.busy && !offbeat.lanes.queued")
        return page.evaluate("offbeat.lanes.view")

    box = page.locator("#lanes").bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 20)
    page.mouse.wheel(0, -240)
    page.wait_for_timeout(200)
    assert view() == whole["view"], "a page that is scrolled must not zoom by accident"
    page.locator("#lanes").scroll_into_view_if_needed()
    box = page.locator("#lanes").bounding_box()
    page.mouse.click(box["x"] + 600, box["y"] + 20)
    page.mouse.wheel(0, -240)
    until(page, f"offbeat.lanes.view[1] - offbeat.lanes.view[0] < {whole['view'][1] - whole['view'][0]} / 2")
    zoomed = view()
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 20)
    page.mouse.up()
    dragged = view()
    assert dragged[0] < zoomed[0]
    assert dragged[1] - dragged[0] == pytest.approx(zoomed[1] - zoomed[0])
    page.keyboard.press("ArrowRight")
    assert view()[0] > dragged[0]
    page.keyboard.press("+")
    assert view()[1] - view()[0] < zoomed[1] - zoomed[0]
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#lanes-detail").startswith("worker 1 at ")
    page.keyboard.press("0")
    assert view() == whole["view"]
    page.mouse.move(box["x"] + 640, box["y"] + 20)
    until(
        page,
        "/worker 0 at .*(waits|computes|communicates|for)/.test(document.getElementById('lanes-detail').textContent)",
    )
    assert seen.errors == []
    page.context.close()


def test_runs_are_chosen_and_compared_and_fit_a_small_dark_screen(browser: Any, past: str) -> None:
    page, seen = page_at(browser, past, width=400, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 22, 29)"
    until(page, "document.querySelectorAll('#runs tbody tr').length === 2")
    page.check("input[aria-label='compare 20200101-sick']")
    until(page, "document.querySelectorAll('#comparison svg path').length === 2")
    page.click("#runs button:has-text('20200101-sick')")
    page.wait_for_selector(".verdict.bad")
    assert page.inner_text(".verdict.bad").startswith("Ended: worker 0 waits for worker 1 in all_reduce #13")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    assert (seen.errors, seen.elsewhere(past.partition("?")[0])) == ([], [])
    page.context.close()


def test_everything_can_be_reached_by_keys(browser: Any, past: str) -> None:
    page, _ = page_at(browser, past)
    reached: set[str] = set()
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )
    wanted = {"choose", "export", "theme", "lanes", "zoom-in", "zoom-all", "process ended"}
    assert wanted <= reached, reached
    page.context.close()


def test_a_saved_page_opens_from_disk_without_a_network(browser: Any, past: str, tmp_path: Path) -> None:
    page, _ = page_at(browser, past)
    live, verdict = page.evaluate(PAINTED, ["all", None]), page.inner_text("#verdicts")
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "saved.html"
    download.value.save_as(file)
    page.context.close()
    saved, seen = page_at(browser, file.as_uri(), offline=True)
    assert saved.inner_text("#verdicts") == verdict != ""
    assert saved.evaluate("document.querySelectorAll('#score svg path').length") > 0
    again = saved.evaluate(PAINTED, ["all", None])
    assert (again["lanes"], again["view"], again["count"]) == (live["lanes"], live["view"], live["count"])
    nearer = saved.evaluate(PAINTED, ["zoom", 0.1])
    assert nearer["count"] < again["count"]
    assert not saved.is_visible("#runs-section")
    assert (seen.errors, seen.elsewhere("file:///")) == ([], [])
    assert json.loads(saved.inner_text("#held") or saved.evaluate("document.getElementById('held').textContent"))["run"]
    saved.context.close()

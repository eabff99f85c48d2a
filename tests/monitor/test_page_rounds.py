"""Federated rounds on the page: rows from the log of a run, drawn in a real browser and in a saved page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from offbeat.monitor.page.export import exported
from offbeat.monitor.page.federated_rounds import CLIENTS, SHOWN, round_rows
from offbeat.monitor.page.run_view import RunView
from offbeat.protocols.federated.plan import ClientSpeeds, RoundPlan
from offbeat.runtime.federated.round_log import ROUNDS_FILE
from offbeat.simulate.federated import VirtualRounds

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def lines(count: int = 4, **rules: Any) -> list[dict[str, Any]]:
    """Rounds of a simulated run, as its log has them."""
    plan = RoundPlan(**{"clients": 6, "fraction": 1.0, "speeds": ClientSpeeds(4.0, 0.5, 1e3), **rules})
    rounds = VirtualRounds(plan, [5, 4, 3, 2, 6, 7], 800, 400, seed=3)
    outcomes = [next(rounds) for _ in range(count)]
    return [
        {"updates": len(each.participants), "refused": 0, **json.loads(msgspec.json.encode(each))} for each in outcomes
    ]


def test_a_row_has_the_phases_of_each_client_and_whom_the_round_waited_for() -> None:
    (row, *_) = round_rows(lines())
    assert row["selected"] == len(row["clients"]) == 6
    slowest = row["clients"][0]
    assert row["waited"] == f"client {slowest['client']}"
    assert [phase for phase, _, _ in slowest["pieces"]] == ["download", "training", "upload"]
    assert slowest["pieces"][0][1] == 0.0
    assert slowest["pieces"][-1][2] == pytest.approx(row["seconds"])


def test_late_and_dropped_clients_are_marked_and_a_deadline_is_what_was_waited_for() -> None:
    rows = round_rows(lines(8, deadline=3.0, dropout=0.3, beat=0.5, silence=1.0))
    fates = [client["fate"] for row in rows for client in row["clients"]]
    assert fates.count("late") == sum(row["late"] for row in rows) > 0
    assert fates.count("dropped") == sum(row["dropped"] for row in rows) > 0
    assert "the deadline" in {row["waited"] for row in rows}
    assert all(stop <= row["seconds"] + 1e-9 for row in rows for each in row["clients"] for *_, stop in each["pieces"])


def test_without_a_deadline_it_is_patience_that_has_ended() -> None:
    late = [{**line, "deadline": None} for line in lines(8, deadline=3.0)]
    assert "the end of patience" in {row["waited"] for row in round_rows(late)}
    assert "the deadline" not in {row["waited"] for row in round_rows(late)}


def test_a_round_that_waited_for_signs_of_life_names_the_silent_client() -> None:
    rows = round_rows(lines(12, dropout=0.3, beat=0.5, silence=20.0))
    assert all(row["waited"].endswith(", silent") for row in rows if row["dropped"])
    assert any(row["dropped"] for row in rows)


def test_of_real_clients_the_phases_are_not_known() -> None:
    (line, *_) = lines()
    for times in line["times"]:
        times |= {"downloaded": None, "trained": None}
    (row,) = round_rows([line])
    assert {phase for client in row["clients"] for phase, _, _ in client["pieces"]} == {"at work"}


def test_a_repeated_round_is_drawn_once_and_only_the_last_rounds_and_slowest_clients_are() -> None:
    (line, *_) = lines()
    assert len(round_rows([line, line])) == 1
    assert len(round_rows([line | {"number": number} for number in range(1, 2 * SHOWN)])) == SHOWN
    many = line | {"times": [{**line["times"][0], "client": client} for client in range(100)]}
    assert len(round_rows([many])[0]["clients"]) == CLIENTS


def a_run(folder: Path) -> RunView:
    config = {"config": {"goal": {"strategy": "federated(clients=6)"}, "workers": 1}, "state": "finished"}
    (folder / "run.json").write_text(json.dumps(config))
    rounds = lines(6, deadline=6.0, dropout=0.2, beat=0.5, silence=1.0)
    (folder / ROUNDS_FILE).write_text("".join(json.dumps(line) + "\n" for line in rounds))
    return RunView("run", folder)


def test_a_page_reads_rounds_as_they_are_written(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert len(run.summary()["rounds"]) == 6
    assert "rounds" in RunView("other", tmp_path / "none").summary()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_a_row_for_each_round_of_a_saved_page(scheme: Any, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    page_file = tmp_path / "page.html"
    page_file.write_text(exported(a_run(tmp_path)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(page_file.as_uri())
        page.wait_for_selector("#rounds tbody tr")
        assert page.locator("#rounds tbody tr").count() == 6
        assert page.locator("#rounds tbody tr").first.locator("th").inner_text() == "6"
        widths = page.locator("#rounds rect.phase-training").evaluate_all(
            "all => all.map((one) => one.getBoundingClientRect().width)"
        )
        assert max(widths) > 20
        assert page.locator("#rounds circle.late, #rounds circle.dropped").count() > 0
        page.screenshot(path=str(tmp_path / f"{scheme}.png"), full_page=True)
        browser.close()
    assert errors == []

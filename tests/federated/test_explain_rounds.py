"""What `offbeat explain` says of federated rounds: whom each waited for, and other settings replayed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_task import Clusters, federated_run

from offbeat.cli.commands.explain import explain_run
from offbeat.cli.display import Display
from offbeat.run import round_advice
from offbeat.run.round_advice import WORST, RoundsExplained, explained_rounds
from offbeat.runtime.federated.round_log import ROUNDS_FILE, RoundLog
from offbeat.runtime.launch import Role
from offbeat.runtime.run.folder import RunFolder
from offbeat.simulate.federated import RoundOutcome, VirtualRounds
from offbeat.strategies import parse
from offbeat.strategies.federated.strategy import Federated

SIZES = np.arange(3, 43)
LINKS = "clients=40, fraction=0.25, dropout=0.1, speeds=lognormal(0.8, bandwidth=100)"


def played(text: str, rounds: int, folder: Path | None = None, seed: int = 4) -> list[RoundOutcome]:
    """Rounds of a strategy without training, in the log of a folder."""
    strategy = parse(text)
    assert isinstance(strategy, Federated)
    virtual = VirtualRounds(strategy.plan(), SIZES, 800, 800, seed)
    outcomes = [next(virtual) for _ in range(rounds)]
    log = RoundLog(folder)
    for outcome in outcomes:
        log.write(outcome, len(outcome.participants), 0)
    return outcomes


def explained(text: str, folder: Path) -> RoundsExplained:
    found = explained_rounds(folder, {"config": {"goal": {"strategy": text}}, "result": {"strategy": text}})
    assert found is not None
    return found


def log_lines(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / ROUNDS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(number: int, started: float, ended: float, *times: tuple[float | None, ...], **more: Any) -> dict[str, Any]:
    """A round of the log: for each client when it had downloaded, trained and uploaded, and disappeared."""
    names = ("downloaded", "trained", "uploaded", "lost")
    clients = [
        {"client": 10 + place, "asked": started, **dict(zip(names, (*each, None, None, None, None), strict=False))}
        for place, each in enumerate(times)
    ]
    return {
        "number": number,
        "started": started,
        "ended": ended,
        "cohort": [each["client"] for each in clients],
        "late": [],
        "dropped": [],
        "updates": len(clients),
        "refused": 0,
        "times": clients,
        **more,
    }


# --- whom a round waited for


def test_a_round_waits_for_the_client_that_came_last_in_the_phase_where_it_lost_most(tmp_path: Path) -> None:
    log_lines(
        tmp_path,
        row(1, 0.0, 30.0, (1.0, 6.0, 7.0), (1.0, 5.0, 6.0), (1.0, 28.0, 30.0)),
        row(2, 30.0, 45.0, (31.0, 35.0, 45.0), (31.0, 35.0, 36.0), (31.0, 36.0, 37.0)),
        row(3, 45.0, 53.0, (46.0, 50.0, 51.0), (50.0, 52.0, 53.0), (46.0, 51.0, 52.0)),
    )
    found = explained("federated(clients=3, fraction=1.0)", tmp_path)
    assert [(each.client, each.phase) for each in found.rounds] == [(12, "training"), (10, "upload"), (11, "download")]
    assert [each.alone for each in found.rounds] == [23.0, 8.0, 1.0]
    assert (found.rounds[0].took, found.rounds[0].usual) == (27.0, 5.0)
    assert [(each.client, each.last, each.alone) for each in found.clients] == [
        (12, 1, 23.0),
        (10, 1, 8.0),
        (11, 1, 1.0),
    ]
    words = "\n".join(found.lines)
    assert "round 1, 30 s: waited for client 12 (27 s of training, median 5 s), 23 s for it alone" in words
    assert "3 rounds in 53 s of the clients' time: 9 updates counted, 0 late, 0 dropped, 0 refused." in words


def test_a_deadline_and_a_client_that_disappeared_are_what_a_round_waits_for(tmp_path: Path) -> None:
    gone = (None, None, None, 2.0)
    log_lines(
        tmp_path,
        row(1, 0.0, 20.0, (1.0, 6.0, 7.0), (1.0, 28.0, 30.0), late=[11], updates=1),
        row(2, 20.0, 30.0, (21.0, 22.0, 23.0), (21.0, 22.0, 30.0)),
    )
    found = explained("federated(clients=2, fraction=1.0, deadline=20)", tmp_path)
    assert [(each.client, each.phase, each.alone) for each in found.rounds] == [
        (None, "deadline", 13.0),
        (11, "upload", 7.0),
    ]
    assert [(each.client, each.late, each.last) for each in found.clients] == [(11, 1, 1)]
    log_lines(tmp_path, row(1, 0.0, 30.0, (1.0, 6.0, 7.0), gone, dropped=[11], updates=1))
    (cause,) = explained("federated(clients=2, fraction=1.0)", tmp_path).rounds
    assert (cause.client, cause.phase, cause.alone) == (11, "silence", 23.0)


def test_every_simulated_round_ended_when_the_rule_says(tmp_path: Path) -> None:
    text = f"federated({LINKS}, over=1.3, deadline=60)"
    outcomes = played(text, 40, tmp_path)
    found = explained(text, tmp_path)
    assert len(found.rounds) == 40
    for outcome, cause in zip(outcomes, found.rounds, strict=True):
        assert cause.seconds == pytest.approx(outcome.ended - outcome.started)
        if cause.phase == "deadline":
            assert cause.seconds == pytest.approx(60)
        elif cause.phase != "silence":
            ended = {each.client: each.uploaded for each in outcome.times}
            assert ended[cause.client or 0] == pytest.approx(outcome.ended)
    assert {cause.phase for cause in found.rounds} >= {"training", "deadline"}


# --- other settings


@pytest.mark.parametrize("deadline", [8.0, 25.0])
def test_a_deadline_replayed_from_the_log_is_the_run_with_that_deadline(
    deadline: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(f"federated({LINKS})", 25, tmp_path)
    monkeypatch.setattr(round_advice, "_rounded_up", lambda _seconds: deadline)
    replayed = explained(f"federated({LINKS})", tmp_path).what_if[1]
    really = played(f"federated({LINKS}, deadline={deadline})", 25)
    assert replayed.setting == f"deadline={deadline:g}"
    assert replayed.seconds == pytest.approx(really[-1].ended)
    assert replayed.updates == sum(len(each.participants) for each in really)
    assert replayed.late == sum(len(each.late) for each in really)
    assert replayed.failed == sum(bool(each.failed) for each in really)


def test_without_over_selection_fewer_updates_count_and_rounds_take_longer(tmp_path: Path) -> None:
    text = f"federated({LINKS}, over=1.5)"
    played(text, 25, tmp_path)
    found = explained(text, tmp_path)
    was, alone = found.what_if[0], found.what_if[-1]
    assert (was.setting, alone.setting) == ("as it was", "over=1")
    assert was.seconds == pytest.approx(found.totals["seconds"])
    assert alone.seconds > was.seconds
    assert alone.updates < was.updates


def test_waiting_for_fewer_clients_ends_rounds_earlier(tmp_path: Path) -> None:
    played(f"federated({LINKS})", 25, tmp_path)
    found = explained(f"federated({LINKS})", tmp_path)
    settings = {each.setting: each for each in found.what_if}
    assert settings["the first 8 of 10 (over=1.25)"].seconds < settings["as it was"].seconds
    deadlines = [each for each in found.what_if if each.setting.startswith("deadline")]
    assert [each.updates for each in deadlines] == sorted(each.updates for each in deadlines)
    assert len("\n".join(found.lines).splitlines()) < 3 * WORST + 10
    json.dumps(found.plain(), allow_nan=False)


def test_times_of_real_clients_are_explained_as_far_as_they_are_known(tmp_path: Path) -> None:
    log_lines(tmp_path, row(1, 100.0, 130.01, (None, None, 110.0), (None, None, 130.0), (None, None, None), late=[12]))
    found = explained("federated(clients=3, fraction=1.0)", tmp_path)
    (cause,) = found.rounds
    assert (cause.client, cause.phase) == (11, "unknown")
    assert cause.alone == pytest.approx(20.01)
    assert not found.what_if
    assert "not in the log" in found.note


def test_a_round_of_real_clients_without_a_deadline_can_have_waited_for_patience_to_end(tmp_path: Path) -> None:
    log_lines(tmp_path, row(1, 100.0, 170.0, (None, None, 110.0), (None, None, 130.0), (None, None, None), late=[12]))
    found = explained("federated(clients=3, fraction=1.0)", tmp_path)
    (cause,) = found.rounds
    assert (cause.client, cause.phase, cause.alone) == (None, "patience", 40.0)
    assert "waited for patience to end (--patience), 40 s after the last update" in "\n".join(found.lines)


def test_an_asynchronous_server_has_slow_clients_and_no_replays(tmp_path: Path) -> None:
    text = f"federated({LINKS}, algorithm=fedbuff(4))"
    played(text, 10, tmp_path)
    found = explained(text, tmp_path)
    assert all(cause.client is not None and math.isfinite(cause.took or 0.0) for cause in found.rounds)
    assert "asynchronous server waits for nobody" in found.note
    assert any(line.startswith("Other settings were not tried") for line in found.lines)


def test_rounds_without_clients_waited_for_nobody(tmp_path: Path) -> None:
    text = "federated(clients=40, fraction=0.02, sampling=poisson)"
    played(text, 12, tmp_path)
    found = explained(text, tmp_path)
    assert {"nobody", "training"} <= {cause.phase for cause in found.rounds}
    assert found.what_if[0].failed == sum(cause.phase == "nobody" for cause in found.rounds) > 0


def test_a_run_of_another_strategy_has_no_rounds(tmp_path: Path) -> None:
    assert explained_rounds(tmp_path, {"result": {"strategy": "allreduce"}}) is None


# --- the command


def test_the_command_explains_a_federated_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path, "clusters", "federated")
    text = "federated(clients=20, fraction=0.5, speeds=lognormal(1.0))"
    result = federated_run(Clusters(), text, 3, folder.path)
    folder.write(config={"goal": {"strategy": text}}, result=result, state="finished")
    explain_run(folder.path, as_json=False)
    words = capsys.readouterr().out
    assert "3 rounds in" in words
    assert "waited for client" in words
    assert "as it was" in words
    explain_run(folder.path, as_json=True)
    plain = json.loads(capsys.readouterr().out)
    assert [each["number"] for each in plain["rounds"]["rounds"]] == [1, 2, 3]


def test_the_display_shows_rounds_and_what_became_of_updates() -> None:
    display = Display()
    counts = {"updates": 120, "late": 3, "dropped": 0, "refused": 1}
    progress = {"kind": "report", "step": 12, "samples": 0, "metrics": {}, "seconds_by_kind": {}, "rounds": counts}
    display.message(Role("worker", 0, "a:b", {}, {}, Path("log")), progress)
    assert "round 12  updates: 120 counted, 3 late, 1 refused" in display.in_words()


def test_every_worker_writes_the_same_rounds_and_only_one_does(tmp_path: Path) -> None:
    result = federated_run(Clusters(), "federated(clients=20, fraction=0.5)", 3, tmp_path)
    found = explained("federated(clients=20, fraction=0.5)", tmp_path)
    assert len(found.rounds) == result["federated"]["rounds"] == 3

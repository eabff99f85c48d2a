"""Leagues on paper: who takes part, in which order, what is done when time runs out, and what the figures say."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from league_support import contestants, entry, league
from rich.console import Console
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from offbeat.cli.commands.compare import _factors, _seconds
from offbeat.errors import CheckpointError, StrategyError, UsageError
from offbeat.league import League, report
from offbeat.league._conductor import Conductor, LeaguePlan, quality
from offbeat.league._contestants import field_of
from offbeat.league._facts import crowded, hashed
from offbeat.league._league import LATEST
from offbeat.league._records import Entry, Planned
from offbeat.league._settings import LeagueSettings
from offbeat.monitor.diagram.shapes import ticks
from offbeat.run.job import Job, target_of
from offbeat.runtime.data.fingerprint import fingerprint
from offbeat.runtime.gradients.optimizers import ScaledRate
from offbeat.runtime.run.folder import new_folder
from offbeat.runtime.run.settings import Goal
from offbeat.statistics import Spread, ratios, spread

DIGITS = Job(target_of("offbeat.tasks.digits", ()), Goal(), workers=2)

# --- statistics


def test_a_miss_is_slower_than_anything_and_is_never_dropped() -> None:
    found = spread([1.0, 2.0, math.inf])
    assert (found.median, found.high) == (2.0, math.inf)
    assert math.isinf(spread([1.0, math.inf, math.inf]).median)
    assert math.isinf(spread([1.0, math.inf]).median)
    assert found.plain() == {"median": 2.0, "low": 1.0, "high": None}


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_an_interval_holds_the_median_and_lies_within_the_values(values: list[float]) -> None:
    found = spread(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_ratios_pair_seeds_so_that_a_seeds_luck_cancels() -> None:
    assert ratios([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == [2.0, 2.0, 2.0]
    assert ratios([1.0], [math.inf]) is None
    assert ratios([], []) is None


def test_a_seed_that_was_missed_counts_against_whoever_missed_it() -> None:
    missed = math.inf
    assert ratios([1.0, missed, missed, 3.0], [2.0, 1.0, missed, missed]) == [0.5, missed, 1.0, 0.0]


# --- who takes part


def test_ddp_its_copy_and_one_worker_take_part_and_sets_mean_several() -> None:
    contestants, refused = field_of(DIGITS, ["local({4,16})", "ddp", "allreduce + local(4)", "single"], single=True)
    assert [one.name for one in contestants] == ["ddp", "ddp, again", "local(4)", "local(16)", "single"]
    assert [one.workers for one in contestants] == [2, 2, 2, 2, 1]
    assert [one.part.eligible for one in contestants] == [True, False, True, True, False]
    assert not refused


def test_the_default_strategies_fit_a_task_and_none_is_needed() -> None:
    names = [one.name for one in field_of(DIGITS, (), single=False)[0]]
    assert names == [
        *("ddp", "ddp, again", "allreduce", "local(4)", "local(16)", "gossip", "hogwild"),
        "server(consistency=ssp(3))",
    ]


def test_a_strategy_that_does_not_fit_is_listed_with_its_reason_and_a_misspelled_one_is_an_error() -> None:
    mixture = dataclasses.replace(DIGITS, what=target_of("offbeat.tasks.mixture", ()))
    contestants, refused = field_of(mixture, ["local(4)", "allreduce"], single=True)
    assert "no gradients to accumulate" in refused["local(4)"]
    assert "allreduce" in {one.name for one in contestants}
    with pytest.raises(StrategyError, match="Did you mean 'gossip'"):
        field_of(DIGITS, ["gosip"], single=True)


def test_a_disturbance_of_servers_is_left_out_where_there_are_none() -> None:
    sentences = ("worker 1: pause 20ms every 1s", "server 0: stop 1s at step 5", "worker *: pace 4ms")
    job = dataclasses.replace(DIGITS, goal=Goal(disturb=sentences))
    by_name = {one.name: one.left_out for one in field_of(job, ["server"], single=True)[0]}
    assert by_name == {"ddp": sentences[1:2], "ddp, again": sentences[1:2], "server": (), "single": sentences[:2]}


# --- order, tuning, budget, going on

PLAN = LeaguePlan(contestants("local(4)"), first_seed=0, seeds=3, grid=(0.5, 1.0, 2.0))


class Runs:
    """Plays runs on a clock of its own: each takes a second; some fail, some are interrupted."""

    def __init__(self, plan: LeaguePlan = PLAN, *, fails: str = "", budget: float | None = None) -> None:
        self.now, self.played, self.fails = 0.0, list[Planned](), fails
        self.interrupt_at: int | None = None
        self.conductor = Conductor(plan, (), self.run, budget=budget, clock=lambda: self.now)

    def run(self, planned: Planned) -> Entry:
        if self.interrupt_at == len(self.played):
            raise KeyboardInterrupt
        self.now += 1
        self.played.append(planned)
        reason = "it cannot" if planned.name == self.fails else None
        best = 2.0 if planned.name == "local(4)" else 1.0
        steps = 100 if planned.factor == best else 200
        made = entry(planned.name, planned.seed, None if reason else 1.0, steps, factor=planned.factor)
        return dataclasses.replace(made, tuning=planned.tuning, wall_seconds=1.0, reason=reason)


def test_everybody_takes_turns_seed_by_seed_and_each_is_first_once() -> None:
    runs = Runs()
    runs.conductor.go()
    counted = [one for one in runs.played if not one.tuning]
    assert [one.seed for one in counted] == [0] * 4 + [1] * 4 + [2] * 4
    assert [one.name for one in counted[::4]] == ["ddp", "ddp, again", "local(4)"]
    assert runs.conductor.left() == []


def test_each_is_tuned_alike_on_a_seed_that_does_not_count_and_the_copy_takes_the_baselines_rate() -> None:
    runs = Runs()
    runs.conductor.go()
    tuning = [one for one in runs.played if one.tuning]
    assert {one.seed for one in tuning} == {10_000}
    assert sorted((one.name, one.factor) for one in tuning) == [
        (name, factor) for name in ("ddp", "local(4)", "single") for factor in (0.5, 1.0, 2.0)
    ]
    rates = {one.name: one.factor for one in runs.played if not one.tuning}
    assert rates == {"ddp": 1.0, "ddp, again": 1.0, "local(4)": 2.0, "single": 1.0}


def test_the_best_rate_needs_the_fewest_steps_then_has_the_best_score_then_changes_the_least() -> None:
    sure, late = entry("a", 0, 9.0, 50), entry("a", 0, 1.0, 60)
    assert quality(sure) < quality(late) < quality(entry("a", 0, None))
    good, bad = (dataclasses.replace(entry("a", 0, None), best_score=score) for score in (0.9, 0.8))
    assert quality(good) < quality(bad)
    lower = [dataclasses.replace(one, target="loss<=0.1") for one in (good, bad)]
    assert quality(lower[1]) < quality(lower[0])
    assert quality(entry("a", 0, 1.0)) < quality(entry("a", 0, 1.0, factor=2.0))


def test_a_short_budget_means_fewer_seeds_for_all_and_says_so() -> None:
    runs = Runs(budget=18.0)
    runs.conductor.go()
    assert len(runs.played) == 17  # nine to tune, and two seeds of four
    assert "only 2 of 3 seeds were run" in runs.conductor.undone[0]
    shorter = Runs(budget=5.0)
    shorter.conductor.go()
    assert [one.factor for one in shorter.played[:3]] == [1.0] * 3
    assert len(shorter.played) == 3 + 4
    assert "only 1 of 3 learning rates" in shorter.conductor.undone[0]


def test_what_has_ended_is_not_run_again_after_an_interruption() -> None:
    whole = Runs()
    whole.conductor.go()
    for stop in (0, 4, 10, 20):
        first = Runs()
        first.interrupt_at = stop
        with pytest.raises(KeyboardInterrupt):
            first.conductor.go()
        then = Runs()
        then.conductor.entries = list(first.conductor.entries)
        then.conductor.go()
        assert first.played + then.played == whole.played


def test_rates_are_chosen_once_even_if_more_time_is_given_later() -> None:
    first = Runs(budget=5.0)
    first.conductor.go()
    then = Runs()
    then.conductor.entries = list(first.conductor.entries)
    then.conductor.go()
    assert not any(one.tuning for one in then.played)
    assert len(then.played) == 8


def test_who_only_fails_is_given_up_and_counts_as_missing() -> None:
    runs = Runs(fails="local(4)")
    runs.conductor.go()
    assert runs.conductor.given_up == ["local(4)"]
    assert sum(one.name == "local(4)" for one in runs.played) == 3
    made = league({"ddp": [1.0] * 3, "local(4)": [1.0] * 3, "single": [1.0] * 3})
    made = dataclasses.replace(made, entries=tuple(runs.conductor.entries), given_up=("local(4)",))
    row = next(row for row in made.rows if row.name == "local(4)")
    assert (row.runs, row.reached, row.failures) == (3, 0, ("it cannot",))
    assert made.winner == "ddp"


def test_what_is_left_is_estimated_from_what_was() -> None:
    runs = Runs()
    assert runs.conductor.estimate(runs.conductor.left()) == 0.0
    runs.conductor.entries = [runs.run(PLAN.tuning_rounds()[0][0])]
    assert runs.conductor.estimate(runs.conductor.left()) == len(runs.conductor.left()) == 20


# --- the table and the verdict


def test_the_first_to_the_target_wins_where_intervals_do_not_overlap() -> None:
    made = league({"ddp": [2.0, 3.0, 4.0], "ddp, again": [2.1, 2.9, 4.1], "local(4)": [1.0, 1.6, 2.1]})
    assert (made.winner, made.ties) == ("local(4)", ())
    first, base, again = made.rows
    assert first.relative is not None
    assert first.relative.median == pytest.approx(0.525)
    assert base.relative == Spread(1.0, pytest.approx(1 / 1.05), pytest.approx(1.05))  # pyright: ignore[reportArgumentType]
    assert again.name == "ddp, again"
    assert "local(4) won: 1.60 s to the target (3 of 3 runs reached it), 0.53x of ddp's time" in made.outcome.words[0]


def test_overlapping_intervals_are_a_tie() -> None:
    made = league({"ddp": [2.0, 3.0, 4.0], "ddp, again": [2.4, 2.5, 4.1], "local(4)": [1.9, 2.9, 4.0]})
    assert (made.winner, made.ties) == ("local(4)", ("ddp",))
    assert "A tie of local(4), ddp" in made.outcome.words[0]


def test_a_strategy_that_mostly_misses_cannot_win_and_a_baseline_that_always_misses_means_seconds() -> None:
    made = league({"ddp": [2.0, None, 4.0], "local(4)": [0.1, None, None], "gossip": [1.0, 1.0, 1.0]})
    assert made.winner == "gossip"
    rows = {row.name: row for row in made.rows}
    assert rows["gossip"].relative is not None
    assert (rows["gossip"].relative.median, rows["gossip"].relative.low) == (0.25, 0.0)
    assert rows["local(4)"].reached == 1
    assert math.isinf(rows["local(4)"].time.median)
    alone = league({"ddp": [None, None, None], "gossip": [1.0, 1.0, 1.0]})
    assert (alone.winner, {row.relative for row in alone.rows}) == ("gossip", {None})
    nobody = league({"ddp": [None, None], "local(4)": [None, None]})
    assert nobody.winner is None
    assert "No strategy reached the target" in nobody.outcome.words[0]


def test_only_seeds_that_all_have_run_count() -> None:
    made = league({"ddp": [2.0, 3.0, 4.0], "local(4)": [1.0, 2.0, 3.0]})
    made = dataclasses.replace(made, entries=made.entries[:-1])
    assert made.seeds == [0, 1]
    assert {row.runs for row in made.rows} == {2}
    assert any("Only 2 seeds" in words for words in made.outcome.words)


def test_the_words_say_which_of_steps_and_time_per_step_made_the_difference() -> None:
    slim = {"compute": 0.45, "communicate": 0.01, "evaluate": 0.05, "wait": 0.0, "input": 0.0, "other": 0.0}
    made = league({"ddp": [1.0] * 3, "ddp, again": [1.0] * 3, "single": [0.4] * 3})
    own = [entry("local(16)", seed, 0.51, 110, seconds_by_kind=slim) for seed in range(3)]
    more = (*made.contestants, contestants("local(16)")[2])
    made = dataclasses.replace(made, entries=(*made.entries, *own), contestants=more)
    assert made.outcome.words[1] == (
        "local(16): its step takes 0.46x of ddp's (it exchanges every 16 steps; mostly communicate 0.091 ms of a step "
        "against 3 ms; exchanging is 2 % of its time against 30 %), for 1.10x the steps."
    )
    assert "But one worker alone is faster: 0.40 s." in made.outcome.words[2]
    assert "ddp run twice differs by 0 %" in made.outcome.words[3]


def test_it_is_said_that_distributing_pays_and_why() -> None:
    made = league({"ddp": [1.0] * 3, "ddp, again": [1.0] * 3, "allreduce": [0.8] * 3, "single": [1.6] * 3})
    assert (
        "Distributing pays here: 2.00x as fast as one worker alone (1.60 s), because a step takes 7.2 ms instead of "
        "14.4 ms."
    ) in made.outcome.words


def test_with_too_few_seeds_everybody_who_arrived_is_in_the_tie() -> None:
    made = league({"ddp": [1.0], "local(4)": [0.1], "gossip": [None]})
    assert (made.winner, made.ties) == ("local(4)", ("ddp",))
    assert "with so few seeds they cannot be told apart" in made.outcome.words[0]
    assert any("Only 1 seed:" in words for words in made.outcome.words)


def test_too_many_threads_are_warned_of() -> None:
    assert crowded(1, 1) is None
    assert "64 workers with 2 threads each share" in (crowded(64, 2) or "")


# --- reports


@pytest.fixture
def told() -> League:
    return league(
        {"ddp": [2.0, 3.0, 4.0], "ddp, again": [2.1, 2.9, None], "local(<b>4)": [1.0, 1.6, 2.1], "single": [3.0] * 3},
        refused={"gossip": "it needs three workers | or more"},
    )


def test_the_table_fits_a_hundred_columns(told: League) -> None:
    text = io.StringIO()
    Console(file=text, width=100, highlight=False).print(report.table(told))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "local(<b>4)" in text.getvalue()
    assert re.search(r"ddp, again +missed|ddp, again +2.90", text.getvalue())


def test_what_contestants_spend_of_privacy_is_shown_if_any_of_them_is_private(told: League) -> None:
    assert "epsilon" not in report.markdown(told)
    spent = [dataclasses.replace(e, epsilon=2 + e.seed / 10) if "<b>" in e.name else e for e in told.entries]
    private = dataclasses.replace(told, entries=tuple(spent))
    rows = {row["strategy"]: row for row in csv.DictReader(io.StringIO(report.csv_of(private)))}
    assert (rows["local(<b>4)"]["epsilon"], rows["ddp"]["epsilon"]) == ("2.1", "")
    assert re.search(r"\| epsilon \|.*\n.*\n.*\| 2.10 \|", report.markdown(private))
    text = io.StringIO()
    Console(file=text, width=100, highlight=False).print(report.table(private))
    assert re.search(r"epsilon +speed-up", text.getvalue().splitlines()[0])
    assert max(map(len, text.getvalue().splitlines())) <= 100


def test_plain_reports_have_every_contestant_and_say_how_to_repeat_it(told: League) -> None:
    plain = json.loads(report.json_of(told))
    assert [row["name"] for row in plain["table"]] == [row.name for row in told.rows]
    assert plain["table"][0]["time"]["median"] == 1.6
    assert plain["table"][2]["time"]["high"] is None
    assert {tag.partition(":")[0].partition(";")[0] for tag in plain["tags"].values()} == {
        *("measured", "computed", "simulated")
    }
    rows = list(csv.DictReader(io.StringIO(report.csv_of(told))))
    assert [row["strategy"] for row in rows] == [row.name for row in told.rows]
    assert float(rows[0]["relative_median"]) == pytest.approx(0.525)
    assert rows[2]["time_high"] == ""
    text = report.markdown(told)
    for piece in ("| local(<b>4) |", "gossip cannot be used here", "Commit abc+", "Data 12ab: hash of the tensors"):
        assert piece in text
    assert "offbeat compare offbeat.tasks.digits --strategy 'local(<b>4)' --workers 2 --seeds 3" in text


def test_federated_contestants_are_compared_by_their_clients_traffic_and_privacy() -> None:
    name = "federated(clients=20, fraction=0.5, speeds=lognormal)"
    row = entry(name, 0, 2.0, steps=8)
    spent = [
        dataclasses.replace(point, epsilon=0.5 * i, client_seconds=10.0 * i) for i, point in enumerate(row.curve, 1)
    ]
    more = {"epsilon": 2.0, "client_seconds": 40.0, "curve": spent}
    told = league({"ddp": [3.0], "ddp, again": [3.0], name: [None], "gossip": [2.5], "single": [3.0]})
    told = dataclasses.replace(
        told, entries=tuple(dataclasses.replace(row, **more) if each.name == name else each for each in told.entries)
    )
    (own,) = [each for each in told.rows if each.name == name]
    assert (own.epsilon, own.client_seconds, own.bytes_sent) == (2.0, 40.0, 4000)
    text = io.StringIO()
    Console(file=text, width=100, highlight=False).print(report.table(told))
    assert max(map(len, text.getvalue().splitlines())) <= 100
    assert "epsilon" in text.getvalue()
    notes = " ".join(report.fine_print(told))
    assert "a step is a round of about 10 clients, 512 examples in 8 rounds against 6,400 of ddp in 100 steps" in notes
    assert "in the clients' own, simulated time it took 40 s to the target" in notes
    rows = list(csv.DictReader(io.StringIO(report.csv_of(told))))
    by_name = {each["strategy"]: (each["epsilon"], each["client_seconds"]) for each in rows}
    assert by_name[name] == ("2.0", "40.0")
    assert by_name["gossip"] == ("", "")


def test_the_page_loads_nothing_and_its_pictures_are_well_formed(told: League) -> None:
    text = report.page(told)
    assert "local(&lt;b&gt;4)" in text
    assert "<b>4" not in text
    assert not re.search(r"<script|<link|<img|src=|url\(", text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 4
    drawn = [ElementTree.fromstring(picture) for picture in pictures]  # noqa: S314 (our own)
    lines = drawn[0].findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 12
    assert "nan" not in text.lower().replace("finance", "")
    for words in ("Score against time", "Score against bytes", "Where the time went", "Time and cores", "(measured)"):
        assert words in text


def test_a_page_can_be_made_of_a_league_in_which_nothing_worked() -> None:
    made = league({"ddp": [None], "single": [None]})
    failed = [dataclasses.replace(e, reason="no", curve=[], seconds_by_kind={}) for e in made.entries]
    made = dataclasses.replace(made, entries=tuple(failed))
    assert "no run ended well" in report.page(made)
    assert report.markdown(made)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 12
    assert all(low - width * 0.01 <= tick <= low + width * 1.01 for tick in found)


# --- what is kept


def test_a_league_is_the_same_after_it_was_written_and_read(told: League, tmp_path: Path) -> None:
    folder = new_folder(tmp_path, "league-x", LATEST)
    dataclasses.replace(told, folder=folder).write()
    again = League.read(folder)
    assert again.rows == told.rows
    assert again.outcome == told.outcome
    assert (tmp_path / "latest-league").resolve() == folder.resolve()
    with pytest.raises(CheckpointError, match="is not a comparison"):
        League.read(tmp_path)


@pytest.mark.parametrize("named", ["{folder}/stranger.py:Push", "stranger:Push(0.5)", "local(4) + stranger:Push"])
def test_reading_a_league_never_runs_code_that_its_file_names(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    name = named.format(folder=tmp_path)
    folder = new_folder(tmp_path, "league-x", LATEST)
    made = league({"ddp": [2.0] * 3, name: [1.0] * 3, "single": [3.0] * 3})
    dataclasses.replace(made, folder=folder).write()
    found = League.read(folder)
    assert found.winner == name
    assert found.outcome.words
    assert report.page(found)
    assert report.markdown(found)
    assert report.json_of(found)
    assert not (tmp_path / "ran").exists()


def test_a_league_that_was_asked_for_differently_is_not_gone_on_with(told: League) -> None:
    before = LeagueSettings.from_plain(told.asked)
    dataclasses.replace(before, seeds=9).check_same(before)
    with pytest.raises(CheckpointError, match="workers was 2, not 3"):
        dataclasses.replace(before, workers=3).check_same(before)


def test_the_command_of_a_league_says_all_that_was_asked() -> None:
    goal = {"epochs": 3, "steps": None, "parts": "iid", "disturb": ["worker 0: pace 4ms"], "timeout": 600.0}
    script = {"script": "my train.py", "arguments": ["--lr", "0.1"]}
    asked = LeagueSettings(
        script, ("local(4)",), 4, target="loss<=0.1", tune=(1.0,), single=False, threads=1, goal=goal
    )
    assert asked.command() == (
        "offbeat compare 'my train.py' --strategy 'local(4)' --workers 4 --seeds 5 --seed 0 --target 'loss<=0.1' "
        "--tune none --no-single --threads 1 --epochs 3 --disturb 'worker 0: pace 4ms' -- --lr 0.1"
    )


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"tune": ()}, {"tune": (0.0,)}, {"tune": (1.0, 1.0)}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"makes no sense|twice"):
        LeagueSettings({"script": "x.py", "arguments": []}, (), 2, **wrong)  # pyright: ignore[reportArgumentType]


def test_budgets_and_grids_are_read_as_people_write_them() -> None:
    assert [_seconds(text) for text in ("90", "90s", "10m", "1.5 h", None)] == [90, 90, 600, 5400, None]
    assert (_factors("none"), _factors("0.5,2")) == (None, (0.5, 2.0))
    for wrong in ("0m", "ten", "-1s"):
        with pytest.raises(UsageError, match="--budget"):
            _seconds(wrong)
    with pytest.raises(UsageError, match="--tune"):
        _factors("a,b")


# --- what a league needs of a run


def trained(rate: float, factor: float) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = SGD([weight], lr=rate, momentum=0.5)
    before = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaled = ScaledRate(factor)
    scaled.before_others(optimizer)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    scaled.after_others(optimizer)
    for step in range(5):
        weight.grad = weight.detach() ** 3
        optimizer.step()
        assert seen[-1] == pytest.approx(rate * factor / (1 + step))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / (1 + step))
        before.step()
    return weight.detach()


def test_a_factor_of_the_rate_is_as_another_rate_under_a_schedule_that_knows_nothing_of_it() -> None:
    assert torch.allclose(trained(0.1, 0.5), trained(0.05, 1.0), rtol=1e-12)
    assert not torch.allclose(trained(0.1, 0.5), trained(0.1, 1.0))
    with pytest.raises(UsageError, match="--rate-factor"):
        Goal(rate_factor=0.0)


def test_fingerprints_tell_data_apart() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    batch = [x, {"y": torch.tensor([1, 2, 3]), "name": "a"}]
    assert fingerprint(batch) == fingerprint([x.clone(), {"y": torch.tensor([1, 2, 3]), "name": "a"}])
    others = [[x + 1, batch[1]], [x.reshape(4, 3), batch[1]], [x, {"y": torch.tensor([1, 2, 4]), "name": "a"}], x]
    assert len({fingerprint(other) for other in [batch, *others]}) == 5
    assert hashed(TensorDataset(x))[0] != hashed(TensorDataset(x * 2))[0]
    assert hashed([(1, 2), (3, 4)]) == hashed([(1, 2), (3, 4)])  # pyright: ignore[reportArgumentType]

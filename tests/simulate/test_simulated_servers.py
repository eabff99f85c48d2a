"""Servers in virtual time: the shortcut is the machine, known limits hold, and the command says it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fit_tasks import Watched
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import offbeat
from offbeat.cli.app import app
from offbeat.cli.commands.bench import Played
from offbeat.errors import OffbeatError, UsageError
from offbeat.protocols.servers import pacing
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import EveryStep, PushAndFetch, RhythmAction, Spring, StepActions
from offbeat.runtime.launch import Launcher
from offbeat.simulate.network import Link
from offbeat.simulate.servers.stragglers import Stragglers, Transient
from offbeat.simulate.servers.training import Paced, ShardTraffic, drive, parse_rule, shortcut, simulate

BSP, ASP = Rule(0), Rule(None)
TRANSIENT = Stragglers.parse("transient(0.2, 0.15)")


def same(one: Paced, other: Paced) -> None:
    assert np.array_equal(one.ends, other.ends), "to the last bit"
    assert np.array_equal(one.staleness, other.staleness)
    assert one.idle_share == pytest.approx(other.idle_share, abs=1e-9)


# --- stragglers


@pytest.mark.parametrize(
    ("text", "mean", "most"),
    [
        ("none", 0.04, 0.04),
        ("transient(0.2, 0.15)", 0.04 + 0.03, 0.24),
        ("permanent(4)", 0.04 * (1 + 3 / 200), 0.16),
        ("permanent(4, 50)", 0.04 * (1 + 3 / 4), 0.16),
        ("lognormal(0.01, 0.5)", 0.04 + 0.01 * np.exp(0.125), np.inf),
        ("pareto(0.01, 3)", 0.04 + 0.005, np.inf),
        ("transient(0.2, 0.15) + permanent(4)", 0.07 + 0.0006, 0.36),
    ],
)
def test_steps_take_what_was_asked_for(text: str, mean: float, most: float) -> None:
    times = Stragglers.parse(text).draw(200, 500)
    assert times.shape == (500, 200)
    assert times.mean() == pytest.approx(mean, rel=0.02)
    assert 0.04 <= times.min() <= times.max() <= most + 1e-12


def test_stragglers_come_from_the_seed_and_parts_do_not_disturb_each_other() -> None:
    once, again, other = (TRANSIENT.draw(7, 50, seed) for seed in (1, 1, 2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    both = Stragglers.parse("transient(0.2, 0.15) + lognormal(0.01, 1)").draw(7, 50, 1)
    assert np.array_equal(both - once > 0, np.ones((50, 7), dtype=bool))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("transiant(0.2, 0.15)", "Did you mean"),
        ("transient(0.2)", "takes numbers: transient(pause, probability)"),
        ("transient(0.2, often)", "takes numbers"),
        ("transient(0.2, 1.5)", "a probability of 0 to 1"),
        ("transient(-1, 0.5)", "'-1' in"),
        ("permanent(0.5)", "a factor of 1 or more"),
        ("permanent(4, 1.5)", "a number of workers"),
        ("pareto(0.1, 0)", "a shape above 0"),
        ("transient(pause=1)", "values in order"),
        ("__import__('os').system('true')", "cannot be read"),
        ("transient(open('x'), 1)", "is not a value"),
        ("transient(0.2,", "cannot be read"),
        ("none(1)", "is unknown"),
        ("", "cannot be read"),
    ],
)
def test_stragglers_that_make_no_sense_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        Stragglers.parse(text)


def test_rules_are_read_as_they_are_written() -> None:
    for text in ("bsp", "ssp(3)", "ssp(3, eager)", "asp", "drop_slowest(2)", "deadline(0.5)"):
        assert str(parse_rule(text)) == text
    for text in ("ssp", "ssp(1.5)", "bsp(1)", "bsp + asp", "ssp(3, lazy)", "drop_slowest"):
        with pytest.raises(UsageError, match="is not a rule"):
            parse_rule(text)


# --- the shortcut is the machine


@pytest.mark.parametrize("rule", [BSP, Rule(1), Rule(3), Rule(40), ASP], ids=str)
@pytest.mark.parametrize(
    "text", ["none", "transient(0.2, 0.15)", "permanent(3)", "lognormal(0.02, 1)", "pareto(0.01, 1)"]
)
def test_the_shortcut_equals_the_machine(rule: Rule, text: str) -> None:
    for workers, steps, seed in ((1, 5, 0), (2, 30, 1), (13, 40, 2), (150, 25, 3)):
        durations = Stragglers.parse(text).draw(workers, steps, seed)
        same(drive(rule, durations), shortcut(rule, durations))


@given(
    st.one_of(st.none(), st.integers(0, 5)),
    st.integers(1, 6).flatmap(
        lambda workers: st.lists(
            st.lists(st.integers(1, 4), min_size=workers, max_size=workers), min_size=1, max_size=12
        )
    ),
)
def test_the_shortcut_equals_the_machine_with_many_ties(bound: int | None, durations: list[list[int]]) -> None:
    times = np.array(durations, dtype=np.float64)
    same(drive(Rule(bound), times), shortcut(Rule(bound), times))


@pytest.mark.parametrize("broken", ["park", "tick"])
def test_a_machine_that_is_wrong_does_not_equal_it(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "park":
        park = pacing.Parked.park
        monkeypatch.setattr(pacing.Parked, "park", lambda self, needed, item: park(self, needed + 1, item))
    else:
        monkeypatch.setattr(pacing.Clocks, "_advance", lambda self: setattr(self, "minimum", max(self._counts)))
    durations = TRANSIENT.draw(8, 40)
    wrong, right = drive(Rule(2), durations), shortcut(Rule(2), durations)
    assert not (np.array_equal(wrong.ends, right.ends) and np.array_equal(wrong.staleness, right.staleness))


def test_there_is_no_shortcut_for_what_depends_on_the_order_of_events() -> None:
    with pytest.raises(UsageError, match="no shortcut for drop_slowest"):
        shortcut(Rule(0, drop=1), TRANSIENT.draw(4, 4))


# --- known limits


def test_bsp_takes_the_mean_of_the_slowest() -> None:
    durations = TRANSIENT.draw(8, 500)
    found = drive(BSP, durations)
    assert found.seconds_per_step == pytest.approx(durations.max(axis=1).mean())
    assert found.idle_share == pytest.approx(1 - durations.mean() / durations.max(axis=1).mean())
    assert found.staleness.tolist() == [8 * 500]


def test_asp_never_waits_and_takes_the_mean() -> None:
    durations = TRANSIENT.draw(8, 500)
    found = drive(ASP, durations)
    assert found.idle_share == pytest.approx(0, abs=1e-9)
    assert np.allclose(found.ends, durations.sum(axis=0))


@given(st.integers(0, 6), st.integers(2, 12), st.integers(0, 1000))
def test_the_bound_is_never_broken_and_a_larger_one_is_never_slower(bound: int, workers: int, seed: int) -> None:
    durations = TRANSIENT.draw(workers, 30, seed)
    tight, loose = (drive(Rule(s), durations) for s in (bound, bound + 1))
    assert len(tight.staleness) - 1 <= bound
    assert tight.staleness.sum() == loose.staleness.sum() == 30 * workers
    assert (loose.ends <= tight.ends).all()


def test_bounded_staleness_helps_against_transient_stragglers_only() -> None:
    def ratio(text: str) -> float:
        ssp, bsp = (simulate(rule, 4, 2000, Stragglers.parse(text)).seconds_per_step for rule in (Rule(3), BSP))
        return ssp / bsp

    assert ratio("transient(0.2, 0.15)") < 0.75
    assert ratio("permanent(4)") == pytest.approx(1, abs=0.03)


def test_backup_workers_help_against_one_that_is_always_slow() -> None:
    slow = Stragglers.parse("permanent(4.5)")
    found = simulate(Rule(0, drop=1), 8, 200, slow)
    assert found.seconds_per_step == pytest.approx(0.04)
    assert found.late == int(200 / 4.5), "every answer of the slow one"
    assert found.idle_share == pytest.approx(0, abs=1e-9)
    assert simulate(BSP, 8, 200, slow).seconds_per_step == pytest.approx(0.18)


def test_a_deadline_bounds_the_step() -> None:
    found = simulate(Rule(0, deadline=0.1), 20, 200, TRANSIENT)
    first = 0.04  # The first step's deadline runs from its first gradient.
    assert found.seconds_per_step <= (first + 200 * 0.1) / 200 + 1e-9
    assert found.late > 0
    assert 0 < found.idle_share < 1
    assert found.staleness.tolist() == [found.staleness.sum()]


# --- through servers


def test_the_busiest_port_sets_the_time_of_an_exchange() -> None:
    link = Link(1e-3, 1e-9, 5e-10)
    quiet = Stragglers(0.5)
    for workers, count in ((1, 1), (4, 4), (4, 8), (8, 2)):
        found = simulate(BSP, workers, 20, quiet, ShardTraffic(count, 10**7, link))
        one_way = 1e-3 + 1e-9 * max(1e7, workers * 1e7 / count)
        apply = 5e-10 * 1e7 / count
        # The first to pull compute and push while the last pull, so that only the last one's way is seen.
        whole = 0.5 + one_way + 1e-3 + 1e-9 * 1e7
        assert whole + apply <= found.seconds_per_step + 1e-9
        assert found.seconds_per_step <= 0.5 + 2 * one_way + workers * apply + 1e-9
        if workers <= count:
            assert found.seconds_per_step == pytest.approx(0.5 + 2 * one_way + workers * apply, rel=1e-6)


def test_full_ports_hide_who_waits_for_whom_and_workers_out_of_step_use_both_ways_at_once() -> None:
    shards = ShardTraffic(1, 10**8, Link(0.0, 1e-9))
    asp, bsp = (simulate(rule, 16, 60, Stragglers(0.01), shards) for rule in (ASP, BSP))
    assert asp.seconds_per_step == pytest.approx(16 * 0.1, rel=0.1), "one way's bytes"
    assert asp.exchange_share > 0.9
    assert asp.seconds_per_step <= bsp.seconds_per_step <= 2 * 16 * 0.1 + 0.01


@pytest.mark.parametrize("rule", [BSP, Rule(3), ASP, Rule(0, drop=2), Rule(0, deadline=0.2)], ids=str)
def test_times_add_up_with_a_network(rule: Rule) -> None:
    found = simulate(rule, 12, 50, TRANSIENT, ShardTraffic(3, 10**7, Link(1e-4, 1e-9, 1e-10)))
    assert 0 <= found.idle_share < 1
    assert 0 < found.exchange_share < 1
    assert found.worked + found.exchanged <= found.ends.sum() * (1 + 1e-12)


def test_progress_is_told() -> None:
    shares: list[float] = []
    simulate(Rule(3), 4, 50, TRANSIENT, ShardTraffic(1, 1000, Link(1e-4, 1e-9)), progress=shares.append)
    assert shares == sorted(shares)
    assert (len(shares), shares[-1]) == (50, 1.0)


# --- when workers exchange


def test_lazy_reads_send_less_and_are_older_than_eager_ones() -> None:
    lazy, eager = (simulate(Rule(3, eager=mode), 6, 200, TRANSIENT) for mode in (False, True))
    assert lazy.pushes == eager.pushes == 6 * 200
    assert lazy.reads < eager.reads + eager.unasked
    assert lazy.staleness_mean > eager.staleness_mean
    assert (lazy.unasked, eager.unasked > 0) == (0, True)
    assert len(lazy.staleness) <= 4, "the bound holds for what is used again, too"


def test_values_that_are_used_again_save_messages_where_workers_keep_together() -> None:
    shards = ShardTraffic(1, 10**6, Link(1e-4, 1e-9))
    lazy, always = (simulate(rule, 4, 100, Stragglers(0.1), shards) for rule in (Rule(4), Rule(0)))
    assert lazy.reads < 0.5 * always.reads
    assert lazy.messages_per_step < always.messages_per_step == 2


def test_downpour_pushes_and_fetches_in_its_own_rhythm() -> None:
    found = simulate(ASP, 4, 60, Stragglers(0.1), rhythm=lambda _: PushAndFetch(push=3, fetch=4))
    assert (found.pushes, found.reads) == (4 * 20, 4 * 15)


def test_only_one_worker_computes_during_a_warm_start() -> None:
    warm = simulate(ASP, 4, 20, Stragglers(0.1), rhythm=lambda worker: PushAndFetch(1, 1, 5, leads=worker == 0))
    assert warm.worked == pytest.approx(0.1 * (4 * 20 - 3 * 5))
    assert np.allclose(warm.ends, 2.0)


def test_a_synchronous_centre_comes_while_workers_compute() -> None:
    shards = ShardTraffic(1, 10**7, Link(1e-3, 1e-9))
    together = simulate(BSP, 4, 40, Stragglers(0.1), shards, rhythm=lambda _: Spring(4, asynchronous=False))
    alone = simulate(ASP, 4, 40, Stragglers(0.1), shards, rhythm=lambda _: Spring(4, asynchronous=True))
    assert together.pushes == alone.pushes == 4 * 9
    assert together.exchange_share < 0.01, "values are there when they are needed"
    assert alone.exchange_share > 0.01, "each waits for the centre"


def test_at_most_two_pushes_are_in_flight() -> None:
    class Pushing(EveryStep):
        def computed(self, clock: int) -> StepActions:
            return StepActions((RhythmAction.PUSH,))

    shards = ShardTraffic(1, 10**8, Link(0.0, 1e-9))
    found = simulate(ASP, 1, 50, Stragglers(0.01), shards, rhythm=lambda _: Pushing())
    assert found.seconds_per_step == pytest.approx(0.1, rel=0.05), "the port sets the pace, not computing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "server(consistency=ssp(3))",
        "server(consistency=ssp(2, eager))",
        "server(consistency=asp)",
        "downpour(push=2, fetch=3)",
        "elastic(period=3)",
    ],
)
def test_a_worker_reads_when_the_simulator_says(strategy: str, launcher: Launcher, tmp_path: Path) -> None:
    steps = 20
    result = offbeat.fit(
        Watched(str(tmp_path), every=1000), strategy, workers=1, steps=steps, launcher=launcher, out=tmp_path / "runs"
    )
    played = Played.of(strategy, 1)
    found = simulate(played.rule, 1, steps + 1, Stragglers(0.1), rhythm=played.rhythm)
    # The simulator counts what the first step is computed from, a run what would follow the last.
    reads = Counter({str(age): int(count) for age, count in enumerate(found.staleness) if count}) - Counter("0")
    assert Counter(result.staleness) == reads


# --- a prediction


def predict(
    rule: Rule,
    workers: int,
    base: float,
    pause: float,
    probability: float,
    exchange: float = 0.0,
    *,
    overlaps: bool = False,
    compute: float = 0.0,
) -> float:
    """Seconds per step of workers paced to `base` seconds, any step of which is paused with some probability.

    `exchange` seconds are added to every step. A pause that comes before the time of the step is taken adds its whole
    length: the step takes `base + pause`. With `overlaps` it falls into a step that is already timed, whose sleep ends
    when it would have ended anyway: `compute` seconds are worked and the rest is slept, so that the step takes
    `max(base, compute + pause)`.
    """
    longer = max(0.0, compute + pause - base) if overlaps else pause
    stragglers = Stragglers(base + exchange, (Transient(longer, probability),))
    return simulate(rule, workers, 10_000, stragglers).seconds_per_step


def test_a_paced_run_is_predicted() -> None:
    paused = 1 - 0.85**4
    assert predict(BSP, 4, 0.04, 0.2, 0.15) == pytest.approx(0.04 + 0.2 * paused, rel=0.02)
    assert predict(BSP, 4, 0.04, 0.2, 0.15, 0.01) == pytest.approx(0.05 + 0.2 * paused, rel=0.02)
    assert predict(BSP, 4, 0.04, 0.2, 0.15, overlaps=True) == pytest.approx(0.04 + 0.16 * paused, rel=0.02)
    assert predict(BSP, 4, 0.04, 0.02, 0.15, overlaps=True, compute=0.01) == pytest.approx(0.04)
    assert predict(Rule(3), 4, 0.04, 0.2, 0.15) < 0.75 * predict(BSP, 4, 0.04, 0.2, 0.15)
    assert predict(ASP, 4, 0.04, 0.2, 0.15) == pytest.approx(0.07, rel=0.02)


# --- what is refused


def test_simulations_that_make_no_sense_are_refused() -> None:
    for workers, steps, complaint in ((0, 1, "1 or more"), (1, 0, "1 or more"), (10**6, 10**6, "memory")):
        with pytest.raises(UsageError, match=complaint):
            simulate(BSP, workers, steps, TRANSIENT)
    with pytest.raises(UsageError, match="leaves nobody"):
        simulate(Rule(0, drop=4), 4, 1, TRANSIENT)
    with pytest.raises(UsageError, match="more than 0 s"):
        Stragglers(0.0)
    with pytest.raises(UsageError, match="1 or more"):
        ShardTraffic(0, 1, Link(0, 0))


# --- the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "server", "--simulate", "--workers", "8", "--steps", "50", *arguments])


def test_the_command_prints_a_table() -> None:
    result = run(
        "--stragglers",
        "transient(0.2, 0.15)",
        "--consistency",
        "bsp",
        "--consistency",
        "drop_slowest(1)",
        "--consistency",
        "asp",
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("servers, 8 workers, 50 steps of 40ms, stragglers: transient(0.2, 0.15)")
    assert [line.split()[0] for line in lines[2:5]] == ["bsp", "drop_slowest(1)", "asp"]
    assert "1.00x" in lines[2]
    assert re.search(r"drop_slowest\(1\): \d+ gradients came too late", result.stdout)


def test_the_command_prints_json_and_nothing_else() -> None:
    result = run("--size", "10MB", "--servers", "2", "--network", "10Gbit,50us", "--format", "json")
    found = json.loads(result.stdout)
    assert [entry["rule"] for entry in found["rules"]] == ["bsp", "ssp(3)", "asp"]
    assert found["servers"] == 2
    bsp = found["rules"][0]
    assert bsp["speedup_over_bsp"] == 1
    assert bsp["staleness"]["histogram"] == [8 * 50]
    assert 0 < bsp["exchange_share"] < 1
    for entry in found["rules"]:
        assert entry["staleness"]["maximum"] == len(entry["staleness"]["histogram"]) - 1


def test_the_command_plays_whole_strategies() -> None:
    strategies = ["server(consistency=ssp(3, eager))", "downpour(push=4, fetch=4)", "elastic", "coded(s=1)"]
    found = json.loads(run(*(word for text in strategies for word in ("--strategy", text)), "--format", "json").stdout)
    assert [entry["name"] for entry in found["rules"]] == strategies
    assert found["rules"][1]["pushes"] == 8 * (50 // 4)
    assert found["rules"][3]["seconds_per_step"] == pytest.approx(2 * 0.04), "every slice is computed twice"


def test_without_bsp_there_is_no_speedup_over_it() -> None:
    assert json.loads(run("--consistency", "asp", "--format", "json").stdout)["rules"][0]["speedup_over_bsp"] is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--size", "1MB"], "need --network"),
        (["--network", "10Gbit,50us"], "needs --size"),
        (["--consistency", "spp(3)"], "is not a rule"),
        (["--stragglers", "often"], "is unknown"),
        (["--step", "0s"], "more than 0 s"),
        (["--seed", "-1"], "--seed -1"),
        (["--strategy", "allreduce"], "trains without servers"),
        (["--strategy", "server + accumulate(4)"], "only the exchange itself"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], complaint: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, OffbeatError)
    assert complaint in str(result.exception)


def test_the_command_knows_the_formats_that_all_commands_know() -> None:
    result = run("--format", "xml")
    assert result.exit_code == 2
    assert re.search(r"'xml' is not one of.*'text',.*'json'", result.output, re.DOTALL)

"""Pictures and tables of schedules, servers and machines: the same bytes and times that everything else computes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
import torch
from cli_support import Offbeat, in_process
from host_entries import Wide
from own_protocols import COURIER, STAR
from torch import nn
from torch.utils.data import TensorDataset

from offbeat import Data, fit
from offbeat.draw import MOST_LANES, Scenario, picture, plain, port_rows, round_rows, timeline_of
from offbeat.errors import UsageError
from offbeat.monitor.diagram.svg import svg
from offbeat.protocols.checker import cost
from offbeat.protocols.collectives import Collective, algorithm
from offbeat.protocols.compression import SUMMED_AT_ONCE
from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.schedule import Layout, View
from offbeat.protocols.servers.consistency import Rule
from offbeat.runtime.launch import Launcher
from offbeat.simulate.network import Link, Network
from offbeat.simulate.schedules import finish_times, trace
from offbeat.simulate.servers.stragglers import Stragglers
from offbeat.simulate.servers.training import ShardTraffic, drive
from offbeat.simulate.timeline import Activity, Timeline
from offbeat.strategies import Exchanging, combined, parse

NETWORK = Network.parse("10Gbit,50us")
SLOW = Stragglers.parse("permanent(2)", 0.04)


LAYER = 4 * 240 * 250


class Layer(Wide):
    """One matrix."""

    def model(self) -> nn.Module:
        return nn.Linear(250, 240, bias=False)

    def data(self) -> Data:
        noise = TensorDataset(torch.randn(24, 250), torch.randint(0, 240, (24,)))
        return Data(noise, noise, noise)


def setting(workers: int, stragglers: Stragglers | None = None, **more: object) -> Scenario:
    return Scenario(tuple(range(workers)), NETWORK, stragglers=stragglers or Stragglers(0.04), **more)  # pyright: ignore


def drawn(text: str, workers: int = 4, **more: object) -> Timeline:
    return timeline_of(text, setting(workers, **more))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def offbeat(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    (tmp_path / "mine.py").write_text(STAR)
    (tmp_path / "couriers.py").write_text(COURIER)
    return in_process(launcher, tmp_path, monkeypatch, capsys)


# -- schedules --------------------------------------------------------------------------------------------------------


TWO_SIDED = ("ring", "naive", "tree", "halving_doubling", "hierarchical")


@pytest.mark.parametrize(
    ("name", "hosts"),
    [*((name, hosts) for name in TWO_SIDED for hosts in ([0] * 7, [0, 0, 0, 1, 1, 2, 2])), ("two_shot", [0] * 7)],
)
def test_transfers_carry_the_checkers_bytes_and_end_when_the_simulator_says(name: str, hosts: list[int]) -> None:
    schedule, view, layout = algorithm(Collective.ALL_REDUCE, name).schedule, View.of(7, hosts), Layout(1003)
    played = trace(schedule(view, layout), view, layout, NETWORK)
    expected = cost(schedule(view, layout), view, layout)
    sent, received = np.zeros(7, dtype=int), np.zeros(7, dtype=int)
    for one in played.transfers:
        sent[one.source] += one.nbytes
        received[one.target] += one.nbytes
        assert one.leaves <= one.left <= one.arrives + 1e-15
        assert one.leaves <= one.comes <= one.arrives
    assert sent.tolist() == expected.bytes_sent.tolist()
    assert received.tolist() == expected.bytes_received.tolist()
    last = max(one.arrives for one in played.transfers)
    assert last == pytest.approx(finish_times(schedule(view, layout), view, layout, NETWORK).max())


def test_a_port_carries_one_message_at_a_time() -> None:
    for text in ("all_reduce(naive)", "all_reduce(ring)", "server(consistency=asp, shards=2)"):
        timeline = drawn(text, 5)
        for lane in range(len(timeline.lanes)):
            for held in (
                [(one.leaves, one.left) for one in timeline.messages if one.source == lane],
                [(one.comes, one.came) for one in timeline.messages if one.target == lane],
            ):
                ordered = sorted(held)
                assert all(stop <= start + 1e-12 for (_, stop), (start, _) in pairwise(ordered))


def test_a_ring_of_four_takes_six_hops_of_a_quarter() -> None:
    timeline = drawn("allreduce(ring)")
    hop = 50e-6 + 25_000_000 / 1.25e9
    assert timeline.end == pytest.approx(0.04 + 6 * hop)
    assert {one.nbytes for one in timeline.messages} == {25_000_000}
    assert {(one.source, one.target) for one in timeline.messages} == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert [one.activity for one in timeline.intervals] == [Activity.COMPUTE] * 4
    assert timeline.lanes == ("worker 0", "worker 1", "worker 2", "worker 3")


def test_a_slow_worker_is_waited_for_in_the_picture_too() -> None:
    timeline = drawn("allreduce(star)", stragglers=SLOW)
    waits = {
        one.lane: one.end - one.begin
        for one in timeline.intervals
        if one.activity is Activity.WAIT and one.begin < 0.05
    }
    assert waits == pytest.approx({1: 0.04, 2: 0.04, 3: 0.04})


@pytest.mark.parametrize(
    ("text", "workers", "nbytes", "messages"),
    [
        ("gossip(exponential)", 8, 100_000_000, 8 * 6),
        ("gossip", 4, 100_000_000, 8 * 4),
        ("local(4)", 4, 25_000_000, 6 * 4),
        ("accumulate(2)", 2, 50_000_000, 4),
        ("allreduce + topk(0.01)", 2, 2_000_000, 2),
        ("gossip + quantize(4)", 2, 12_548_832, 8),
        ("allreduce(gloo)", 4, 25_000_000, 6 * 4),
    ],
)
def test_what_strategies_exchange_in_a_turn(text: str, workers: int, nbytes: int, messages: int) -> None:
    timeline = drawn(text, workers)
    assert {one.nbytes for one in timeline.messages} == {nbytes}
    assert len(timeline.messages) == messages


def test_halves_of_a_long_row_are_summed_piece_by_piece() -> None:
    timeline = drawn("allreduce + half", 2)
    pieces = [one.nbytes for one in timeline.messages]
    assert sum(pieces) == 4 * 25_000_000
    assert len(pieces) == 4 * -(-25_000_000 // SUMMED_AT_ONCE)


def test_updated_slices_are_handed_round_when_all_is_computed() -> None:
    timeline = drawn("zero1", 2)
    assert [one.nbytes for one in timeline.messages] == [6_250_000] * 32, "in 8 units, a half and a slice to each other"
    summed = max(one.arrives for one in timeline.messages[:16])
    assert min(one.leaves for one in timeline.messages[16:]) >= summed > 0.04


def test_parameters_are_gathered_in_forward_and_in_backward() -> None:
    timeline = drawn("zero3", 2)
    assert [one.nbytes for one in timeline.messages] == [6_250_000] * 2 * (8 + 7 + 8)


@pytest.mark.parametrize(
    "text",
    ["allreduce", "allreduce(ring)", "allreduce(gloo)", "zero1", "zero3", "local(2)", "gossip",
     "gossip(exponential) + local(2)", "allreduce + topk(0.05)", "allreduce + half", "allreduce + lowrank(2)",
     "gossip + quantize(8)"],
)  # fmt: skip
def test_what_is_planned_is_what_runs(text: str, launcher: Launcher, tmp_path: Path) -> None:
    result = fit(Layer(), text, workers=2, steps=4, seed=1, out=tmp_path, launcher=launcher)
    ran, view = msgspec.convert(result.predicted["exchanges"], list[Exchanged]), View.of(2, [0, 0])
    strategy = combined(parse(text))
    forms: Any = [one.format() for one in strategy.compressions]  # pyright: ignore[reportAttributeAccessIssue]
    exchange: Any = strategy.exchange
    when: Any = strategy.when
    planned = exchange.planned(view, LAYER, forms) if when is None else when.planned(exchange, view, LAYER, forms)
    # What workers tell each other of their examples, alone or in a bucket, is left out of pictures.
    large = [[one for one in exchanges if one.nbytes > 64] for exchanges in (ran, planned.exchanges)]
    assert [(a.what, a.by) for a in large[0]] == [(b.what, b.by) for b in large[1]]
    assert [a.nbytes for a in large[0]] == pytest.approx([b.nbytes for b in large[1]], abs=64)
    assert result.predicted["period"] == planned.period


def test_steps_are_drawn_as_many_as_are_asked_for() -> None:
    for steps in (1, 3):
        timeline = drawn("allreduce(ring)", 2, steps=steps)
        computed = [one for one in timeline.intervals if one.activity is Activity.COMPUTE and one.lane == 0]
        assert (len(computed), len(timeline.messages)) == (steps, 4 * steps)
    assert len(drawn("local(2)", 2, steps=5).messages) == 8


# -- servers ----------------------------------------------------------------------------------------------------------

SERVED = ["server", "server(consistency=ssp(2))", "server(consistency=ssp(2, eager))", "server(consistency=asp)",
          "downpour(push=2, fetch=3)", "elastic(period=2)", "elastic(asynchronous=False)", "coded",
          "server(consistency=drop_slowest(1), shards=2)", "server(consistency=deadline(0.3))"]  # fmt: skip


@pytest.mark.parametrize("text", SERVED)
def test_every_push_and_pull_of_the_simulation_is_drawn(text: str) -> None:
    timeline = drawn(text, steps=7, stragglers=SLOW)
    exchange = combined(parse(text)).exchange
    assert isinstance(exchange, Exchanging)
    servers, _, rule = exchange.servers(4) or (0, 0, Rule(0))
    shards = ShardTraffic(servers, 100_000_000, NETWORK.between)
    paced = drive(rule, SLOW.draw(4, 7, 0) * exchange.work, shards, exchange.rhythm())
    pushes = [one for one in timeline.messages if one.target == 4]
    assert (len(pushes), len(timeline.messages) - len(pushes)) == (paced.pushes, paced.reads + paced.unasked)
    waits = [one for one in timeline.intervals if one.activity is Activity.WAIT]
    assert max(one.end for one in (*waits, *timeline.intervals)) == pytest.approx(paced.ends.max())


def test_lazy_and_eager_reading_differ_in_the_picture() -> None:
    lazy, eager = (drawn(f"server(consistency=ssp(2{mode}))", steps=6, stragglers=SLOW) for mode in ("", ", eager"))
    assert len(lazy.messages) < len(eager.messages)
    assert any("unasked" in one.label for one in eager.messages)
    assert not any("unasked" in one.label for one in lazy.messages)


def test_a_compressed_push_is_smaller_than_the_values_that_come_back() -> None:
    timeline = drawn("server + topk(0.01)", 2)
    sizes = {one.target == 2: one.nbytes for one in timeline.messages}
    assert sizes == {True: 2_000_000, False: 100_000_000}
    assert drawn("server", 2).end > timeline.end


# -- machines ---------------------------------------------------------------------------------------------------------


def test_asynchronous_gossip_is_drawn_from_its_machine() -> None:
    timeline = drawn("gossip(asynchronous=True)", 5, steps=4, nbytes=1_000_000, stragglers=SLOW)
    kinds = {one.label for one in timeline.messages}
    assert {"ask", "grant"} <= kinds
    asked = [one for one in timeline.messages if one.label == "ask"]
    assert {one.nbytes for one in asked} == {1_000_000}
    assert asked[0].arrives - asked[0].leaves == pytest.approx(50e-6 + 1_000_000 / 1.25e9)
    assert timeline == drawn("gossip(asynchronous=True)", 5, steps=4, nbytes=1_000_000, stragglers=SLOW)


def test_own_machines_are_drawn_until_they_are_done(offbeat: Offbeat) -> None:
    said = offbeat("draw", "couriers.py:Deliveries", "-w", "3", "--format", "json")
    told = json.loads(said.out)
    assert told["lanes"] == ["courier", "house 0", "house 1", "house 2"]
    assert [one["label"] for one in told["messages"]].count("parcel") == 9


# -- the command ------------------------------------------------------------------------------------------------------


def test_an_own_schedule_is_drawn_and_told_round_by_round(offbeat: Offbeat) -> None:
    said = offbeat("draw", "mine.py:my_star", "-w", "3", "--size", "12MB", "-o", "star.svg")
    assert said.code == 0
    first = next(line for line in said.out.splitlines() if line.split()[:2] == ["0", "send"])
    assert first.split()[2:] == ["1→0,", "2→0", "12", "MB", "0", "s", "19.3", "ms"]
    assert "rank 0" in said.out
    assert "Drawn: star.svg" in said.out


def test_the_picture_is_one_svg_with_a_lane_for_everybody_and_a_legend(offbeat: Offbeat, tmp_path: Path) -> None:
    said = offbeat(
        "draw", "allreduce(hierarchical)", "-w", "8", "--per-host", "4", "-o", "hosts.svg", "--format", "json"
    )
    told = json.loads(said.out)
    assert told["hosts"] == [0, 0, 0, 0, 1, 1, 1, 1]
    root = ElementTree.parse(tmp_path / "hosts.svg").getroot()  # noqa: S314 - our own file
    words = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("worker 0", "worker 7", "host 1", "computes", "waits", "port out: sends", "50 MB", "virtual time"):
        assert expected in words
    arrows = [one for one in root.iter("{http://www.w3.org/2000/svg}path") if one.get("class") == "arrow"]
    assert len(arrows) == 2 * (len(told["messages"]) + 1), "a line and a head for each, and one in the legend"
    assert "http" not in (tmp_path / "hosts.svg").read_text().replace("http://www.w3.org/2000/svg", "")


def test_a_png_is_drawn_where_matplotlib_is(offbeat: Offbeat, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert offbeat("draw", "all_gather(ring)", "-w", "2", "-o", "two.png").code == 0
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_thirty_two_ranks_can_be_drawn_and_more_are_told_in_a_table_only(offbeat: Offbeat) -> None:
    whole = svg(picture(drawn("server(shards=4)", 32), ""))
    assert "worker 31" in whole
    assert len(drawn("server", 32).lanes) == MOST_LANES
    said = offbeat("draw", "all_reduce(tree)", "-w", "40", "-o", "tree.svg")
    assert said.code == 2
    assert "a picture of 40 lanes cannot be read: draw 32 workers or fewer" in said.err
    assert offbeat("draw", "all_reduce(tree)", "-w", "40").code == 0
    with pytest.raises(UsageError, match="more than 20,000"):
        picture(drawn("local(1)", 32, steps=11), "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ddp"], "ddp cannot be drawn: torch's own DistributedDataParallel decides when"),
        (["hogwild"], "hogwild cannot be drawn: its workers write to shared memory"),
        (["allreduce(auto)"], "Name one, such as ring"),
        (["single", "-w", "1"], "a single worker sends nothing"),
        (["allgather(ring)"], "'allgather' is neither a strategy nor a collective. Did you mean 'all_gather'?"),
        (["all_gather(rng)"], "Did you mean 'ring'?"),
        (["all_gather"], "all_gather has several algorithms; name one"),
        (["server + accumulate(2)"], "only the exchange itself is played"),
        (["allreduce(rng)"], "ring"),
        (["mine.py:my_sta"], "Did you mean 'my_star'?"),
        (["allreduce", "--per-host", "0"], "--per-host 0 makes no sense"),
        (["allreduce", "--workers", "0"], "--workers 0 makes no sense"),
        (["allreduce", "-o", "ring.pdf"], "ring.pdf is not a name for a picture"),
        (["allreduce", "--network", "fast"], "is not a network"),
        (["allreduce", "--size", "big"], "is not a size"),
        (["allreduce", "-w", "0"], "--workers 0 makes no sense"),
        (["allreduce", "--steps", "0"], "--steps 0 makes no sense"),
        (["allreduce(one_shot)", "--per-host", "2"], "To draw it on one host, add --per-host 4."),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_reason(offbeat: Offbeat, words: list[str], told: str) -> None:
    said = offbeat("draw", *words)
    assert said.code == 2
    assert told in said.err
    assert said.out == ""


def test_help_lists_draw_below_the_front_page_and_teaches(offbeat: Offbeat) -> None:
    front, _, below = offbeat("--help").out.partition("More commands")
    assert "draw" in below
    assert "│ draw" not in front
    assert "mine.py:my_ring" in offbeat("draw", "--help").out


def test_ports_add_up_in_the_table_and_in_json() -> None:
    timeline = drawn("server(consistency=bsp)", 3, steps=2)
    rows = {row.name: row for row in port_rows(timeline)}
    assert rows["server"].received == 3 * 2 * 100_000_000
    assert rows["worker 1"].sent == rows["worker 1"].received == 200_000_000
    assert rows["worker 1"].computing == pytest.approx(0.08)
    assert json.loads(json.dumps(plain(timeline)))["ports"][3]["name"] == "server"
    columns, told = round_rows(timeline)
    assert columns[0] == "leaves"
    assert len(told) == len(timeline.messages)


def test_one_link_of_an_uneven_network_shows_in_the_times() -> None:
    apart = Scenario((0, 0, 1, 1), Network(Link(1.0, 0.0), Link(0.001, 0.0)), nbytes=400)
    timeline = timeline_of("all_reduce(hierarchical)", apart)
    took = {one.arrives - one.leaves for one in timeline.messages}
    assert {round(one, 6) for one in took} == {0.001, 1.0}


def test_an_own_strategy_that_says_nothing_is_refused_with_what_to_give_it(offbeat: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(
        "from dataclasses import dataclass\nfrom offbeat.strategies import Exchanging\n\n"
        "@dataclass(frozen=True)\nclass Silent(Exchanging):\n    name = 'silent'\n"
    )
    said = offbeat("draw", "silent.py:Silent")
    assert said.code == 2
    assert "give it `planned` or `rhythm`" in said.err

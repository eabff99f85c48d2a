"""Pictures and tables of pipelines: every computation and message of the schedule, and how long stages idle."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli_support import Offbeat, in_process

from offbeat.draw import Scenario, picture, timeline_of
from offbeat.protocols.checker import cost
from offbeat.protocols.pipelines.formulas import bubble_share
from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.protocols.pipelines.plan import PartEdge, PipelinePlan
from offbeat.protocols.pipelines.rounds import rounds
from offbeat.runtime.launch import Launcher
from offbeat.simulate.network import Link, Network
from offbeat.simulate.servers.stragglers import Stragglers
from offbeat.simulate.timeline import Activity, Timeline

INTERLEAVED = "pipeline(4, interleaved, chunks=2)"
FREE = Network.uniform(Link(0.0, 0.0))


@pytest.fixture
def offbeat(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


def drawn(text: str, stages: int = 4, network: Network = FREE, slow: str = "none") -> Timeline:
    stragglers = Stragglers.parse(slow, 0.04)
    return timeline_of(text, Scenario(tuple(range(stages)), network, 1000, stragglers=stragglers, microbatches=8))


def test_every_computation_and_message_of_the_schedule_is_drawn() -> None:
    timeline = drawn(INTERLEAVED, network=Network.parse("10Gbit,50us"))
    edges = tuple(PartEdge(part, part + 1, 1000) for part in range(7))
    plan = PipelinePlan(PipelineKind.INTERLEAVED, 4, 8, 2, edges, tells_loss=True)
    expected = cost(rounds(plan), plan.view(), plan.layout)
    computed = [each for each in timeline.intervals if each.activity.computes]
    assert len(computed) == 4 * 2 * 8 * 2
    assert len(timeline.rounds) == expected.rounds
    for stage in range(4):
        sent = [each.nbytes for each in timeline.messages if each.source == stage]
        assert sum(sent) == expected.bytes_sent[stage]
        order = [(each.label, each.mark, each.later) for each in computed if each.lane == stage]
        assert order[0] == ("forward of microbatch 0", "0a", False)
        assert ("backward of microbatch 7, chunk 1", "7b", True) in order


@pytest.mark.parametrize("kind", PipelineKind)
def test_the_gaps_between_computations_are_the_bubble(kind: PipelineKind) -> None:
    chunks = 2 if kind is PipelineKind.INTERLEAVED else 1
    timeline = drawn(f"pipeline(4, {kind.value}, chunks={chunks})")
    idle = sum(each.end - each.begin for each in timeline.intervals if each.activity is Activity.WAIT)
    share = bubble_share(kind, 4, 8, chunks)
    assert idle / (4 * timeline.end) == pytest.approx(share)
    assert f"Stages idle {share:.1%} of the time" in timeline.notes[0]
    for stage in range(4):
        spans = sorted((each.begin, each.end) for each in timeline.intervals if each.lane == stage)
        assert sum(end - begin for begin, end in spans) == pytest.approx(timeline.end), "all time is accounted for"


def test_a_gap_says_what_is_waited_for() -> None:
    labels = {(each.lane, each.label) for each in drawn("pipeline(2)", 2).intervals if each.activity is Activity.WAIT}
    assert (1, "waits for activations of microbatch 0, part 0 to 1") in labels
    assert (0, "waits for gradients of microbatch 0, part 1 to 0") in labels
    assert (1, "has computed everything") in labels


def test_a_slow_stage_delays_the_others() -> None:
    assert drawn("pipeline(4)", slow="permanent(2)").end > 1.5 * drawn("pipeline(4)").end


def test_forward_backward_and_chunks_look_different_and_show_their_microbatch(offbeat: Offbeat, tmp_path: Path) -> None:
    said = offbeat("draw", INTERLEAVED, "--microbatches", "8", "-o", "pipe.svg")
    assert said.code == 0
    assert "activations 0, 0 to 1" in said.out
    assert "with equal stages and free messages it would be 15.8% (interleaved, 8 microbatches)" in said.out
    root = ElementTree.parse(tmp_path / "pipe.svg").getroot()  # noqa: S314 - our own file
    space = "{http://www.w3.org/2000/svg}"
    looks = [each.get("class") for each in root.iter()]
    legend = {"forward": 1, "backward": 1, "later-forward": 0, "later-backward": 0}
    assert {look: looks.count(look) - extra for look, extra in legend.items()} == dict.fromkeys(legend, 32)
    words = [each.text for each in root.iter(f"{space}text")]
    for expected in ("0a", "7b", "stage 3", "forward", "backward", "idles"):
        assert expected in words
    assert words.count("3a") == 8, "forward and backward on each stage"


def test_weight_gradients_are_drawn_apart() -> None:
    looks = [each.look for each in picture(drawn("pipeline(4, zero_bubble)"), "").inside if hasattr(each, "look")]
    assert looks.count("weights") == looks.count("forward") == 32


def test_numbers_of_workers_and_microbatches_are_the_strategys(offbeat: Offbeat) -> None:
    told = json.loads(offbeat("draw", "pipeline(3, gpipe, microbatches=5)", "--format", "json").out)
    assert told["lanes"] == ["stage 0", "stage 1", "stage 2"]
    computed = [each["label"] for each in told["intervals"] if each["lane"] == 0 and each["activity"] == "forward"]
    assert computed == [f"forward of microbatch {number}" for number in range(5)]
    assert len(json.loads(offbeat("draw", "pipeline(2)", "--format", "json").out)["messages"]) == 2 * 8 + 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([INTERLEAVED, "--microbatches", "6"], "use 4 or 8 microbatches"),
        (["pipeline(4)", "--microbatches", "0"], "--microbatches 0 makes no sense"),
        (["allreduce", "--microbatches", "4"], "only pipelines have them"),
        (["all_gather(ring)", "--microbatches", "4"], "only pipelines have them"),
        (["pipeline(2)", "-w", "4"], "drawn for one replica, which takes 2 workers, not 4"),
        (["pipeline(2)", "-w", "3"], "pipeline(2)"),
        (["allreduce + pipeline(2)"], "Draw pipeline(2) by itself"),
        (["pipeline(2)", "--steps", "2"], "one step of a pipeline is drawn"),
        (["pipeline(33)", "-o", "wide.svg", "--microbatches", "2"], None),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_reason(offbeat: Offbeat, words: list[str], told: str | None) -> None:
    said = offbeat("draw", *words)
    if told is None:
        assert said.code == 0
        return
    assert said.code == 2
    assert told in said.err
    assert said.out == ""

"""One shard: what it does with the entries of its log, rule by rule."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_worlds import Gradient, Store

from offbeat.protocols.machine import NOTHING, Payload
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import (
    ClusterView,
    Enter,
    Entry,
    Fetch,
    Load,
    Members,
    Message,
    Pull,
    Push,
    PushRefused,
    PushReply,
    Replicate,
    StepDeadline,
    Viewed,
)
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import AccumulateGradient, Discard, EntryOutcome, Restore, Update


class Numbered:
    """A shard whose workers' pushes are numbered for them."""

    def __init__(self, rule: Rule, workers: int) -> None:
        self.view = ClusterView.of(workers, 1)
        self.shard = Shard(rule, self.view)
        self.store = Store()
        self.numbers = dict.fromkeys(range(workers), 0)

    def push(self, worker: int, clock: int, *, part: int = 0, unfit: str = "", **fields: Any) -> EntryOutcome:
        message = Push(worker=worker, number=self.numbers[worker], clock=clock, **fields)
        self.numbers[worker] += 1
        entry = PushRefused(message, unfit) if unfit else message
        return self.apply(entry, Payload(1, Gradient(worker, 0, 0, clock, 0, part)))

    def apply(self, entry: Entry, payload: Payload = NOTHING) -> EntryOutcome:
        outcome = self.shard.apply(entry, payload)
        for work in outcome.works:
            self.store.perform(work)
        return outcome

    def without(self, *workers: int) -> EntryOutcome:
        left = tuple(worker for worker in self.view.workers if worker not in workers)
        self.view = msgspec.structs.replace(self.view, epoch=self.view.epoch + 1, workers=left)
        return self.apply(Members(self.view))


def statuses(outcome: EntryOutcome) -> list[str]:
    return [answer.status for answer in outcome.answers]


def kinds(outcome: EntryOutcome) -> list[type]:
    return [type(work) for work in outcome.works]


def test_bsp_sums_a_step_by_weight_and_applies_it_once_over_the_total():
    numbered = Numbered(Rule(0), 2)
    assert kinds(numbered.push(0, 0, weight=3.0)) == [AccumulateGradient]
    last = numbered.push(1, 0, weight=1.0, settings=({"lr": 0.5},))
    assert last.works[1:] == [Update(1, 1 / 4, ({"lr": 0.5},), workers=2)]
    assert numbered.store.value == pytest.approx((3 * 6 + 1 * 9) / 4)
    assert (numbered.shard.version, numbered.shard.minimum) == (1, 1)


def test_a_step_without_settings_keeps_those_before_it():
    numbered = Numbered(Rule(0), 1)
    numbered.push(0, 0, settings=({"lr": 0.5},))
    assert numbered.push(0, 1).works[-1] == Update(2, 1.0, ({"lr": 0.5},))


def test_ssp_applies_each_push_at_once_with_weight_one_over_the_workers():
    numbered = Numbered(Rule(2), 4)
    (update,) = numbered.push(0, 0, weight=7.0, version=0).works
    assert isinstance(update, Update)
    assert (update.scale, update.version, update.missed) == (1 / 4, 1, 0)
    (update,) = numbered.push(1, 0).works
    assert isinstance(update, Update)
    assert update.missed == 1
    numbered.without(2, 3)
    (update,) = numbered.push(0, 1).works
    assert isinstance(update, Update)
    assert update.scale == 1 / 2


def test_a_push_that_comes_again_is_left_unused_and_counted():
    numbered = Numbered(Rule(None), 1)
    numbered.push(0, 0)
    numbered.numbers[0] = 0
    again = numbered.push(0, 0)
    assert (kinds(again), statuses(again)) == ([Discard], ["duplicate"])
    assert numbered.shard.counts == {"applied": 1, "duplicate": 1}


def test_drop_slowest_completes_a_step_with_the_first_and_discards_the_late():
    numbered = Numbered(Rule(0, drop=1), 3)
    numbered.push(0, 0)
    assert numbered.push(1, 0).moved
    assert numbered.store.value == pytest.approx((6 + 9) / 2)
    late = numbered.push(2, 0)
    assert (kinds(late), statuses(late)) == ([Discard], ["late"])
    assert statuses(numbered.push(2, 1)) == ["applied"]
    assert numbered.push(0, 1).moved


def test_microbatches_that_came_before_the_deadline_count_by_their_weight_and_the_rest_is_late():
    numbered = Numbered(Rule(0, deadline=1.0), 2)
    for _ in range(3):
        part = numbered.push(0, 0, weight=2.0, last=False, counts=True)
        assert (kinds(part), statuses(part)) == ([AccumulateGradient], ["applied"])
    early = numbered.push(1, 0, weight=4.0, last=False, counts=True)
    assert not early.moved, "nobody has done the step, and its time is not over"
    closed = numbered.apply(StepDeadline(0))
    assert closed.works == [Update(1, 1 / 10, (), workers=2)]
    assert numbered.store.value == pytest.approx((3 * 2 * 6 + 4 * 9) / 10)
    assert statuses(numbered.push(0, 0, weight=2.0)) == ["late"]
    assert statuses(numbered.push(1, 0, weight=4.0, last=False, counts=True)) == ["late"]
    assert numbered.shard.counts == {"applied": 4, "late": 2}


def test_an_unfit_microbatch_spoils_no_other():
    numbered = Numbered(Rule(0, deadline=1.0), 1)
    numbered.push(0, 0, weight=1.0, last=False, counts=True)
    assert statuses(numbered.push(0, 0, weight=1.0, last=False, counts=True, unfit="NaN")) == ["refused"]
    assert numbered.push(0, 0, weight=3.0).works[-1] == Update(1, 1 / 4, ())


def test_a_deadline_completes_a_step_with_whatever_has_come():
    numbered = Numbered(Rule(0, deadline=1.0), 3)
    numbered.push(2, 0, weight=5.0)
    outcome = numbered.apply(StepDeadline(0))
    assert outcome.works == [Update(1, 1 / 5, (), workers=3)]
    assert not numbered.apply(StepDeadline(0)).moved, "the deadline of a step that is over does nothing"
    assert not numbered.apply(StepDeadline(1)).moved, "nothing has come yet"
    assert numbered.push(0, 1).moved, "an overdue step is complete with the first that comes"


def test_parts_of_a_step_count_whole_or_not_at_all():
    numbered = Numbered(Rule(0), 2)
    first = numbered.push(0, 0, part=0, start=0, stop=5, last=False)
    assert (first.works, first.answers) == ([], [])
    assert numbered.shard._sum.holds(0, 0)
    second = numbered.push(0, 0, part=1, start=5, stop=9)
    assert [(work.start, work.stop) for work in second.works if isinstance(work, AccumulateGradient)] == [
        (0, 5),
        (5, 9),
    ]
    assert statuses(second) == ["applied", "applied"]
    numbered.push(1, 0, last=False)
    gone = numbered.without(1)
    assert kinds(gone) == [Discard, Update], "the dead worker's half step is left out, and nobody waits for it"
    assert numbered.store.total == 0


def test_half_a_step_that_is_late_is_discarded_whole():
    numbered = Numbered(Rule(0, drop=1), 2)
    numbered.push(1, 0, last=False)
    outcome = numbered.push(0, 0)
    assert statuses(outcome) == ["applied", "late"]
    assert statuses(numbered.push(1, 0)) == ["late"]
    assert [gradient.worker for gradient in numbered.store.used] == [0]


def test_an_unfit_push_is_left_out_named_and_holds_nobody_up():
    numbered = Numbered(Rule(0), 2)
    numbered.push(0, 0)
    outcome = numbered.push(1, 0, unfit="NaN")
    assert outcome.moved
    assert [(answer.status, answer.reason) for answer in outcome.answers] == [("refused", "NaN")]
    assert outcome.works[-1] == Update(1, 1.0, (), workers=2)
    assert numbered.shard.counts["refused"] == 1


def test_a_push_ahead_of_the_open_step_is_refused():
    numbered = Numbered(Rule(0), 2)
    outcome = numbered.push(0, 1)
    assert statuses(outcome) == ["refused"]
    assert "step 1" in outcome.answers[0].reason


def test_one_who_does_not_take_part_is_refused():
    numbered = Numbered(Rule(None), 2)
    numbered.without(1)
    assert statuses(numbered.push(1, 0)) == ["refused"]


def test_all_reads_are_released_that_the_minimum_allows_not_only_those_that_need_exactly_it():
    numbered = Numbered(Rule(1), 4)
    for clock in range(3):
        numbered.push(0, clock)
    for clock in range(2):
        numbered.push(1, clock)
    assert not numbered.shard.ask(Pull(worker=0, number=1, clock=3))
    assert not numbered.shard.ask(Pull(worker=1, number=1, clock=2))
    assert not numbered.shard.ask(Pull(worker=1, number=1, clock=2)), "asked again it is not parked twice"
    outcome = numbered.without(2, 3)
    assert numbered.shard.minimum == 2
    assert sorted((ask.worker, ask.clock) for ask in outcome.due) == [(0, 3), (1, 2)]


def test_the_staleness_of_a_read_is_how_far_the_slowest_is_behind():
    numbered = Numbered(Rule(3), 2)
    for clock in range(2):
        numbered.push(0, clock)
    assert numbered.shard.ask(Pull(worker=0, number=1, clock=2))
    assert numbered.shard.ask(Pull(worker=1, number=1, clock=0))
    assert numbered.shard.staleness == {2: 1, 0: 1}


def test_a_read_waits_for_the_readers_own_push():
    numbered = Numbered(Rule(None), 2)
    assert not numbered.shard.ask(Pull(worker=0, number=1, clock=1, after=0))
    numbered.push(1, 0)
    outcome = numbered.push(0, 0)
    assert [ask.number for ask in outcome.due] == [1]


def test_a_checkpoint_waits_for_its_step_and_a_state_that_is_put_back_sets_the_clocks():
    numbered = Numbered(Rule(3), 1)
    assert not numbered.shard.ask(Fetch(worker=0, number=1, clock=1))
    assert [type(ask) for ask in numbered.push(0, 0).due] == [Fetch]
    outcome = numbered.apply(Load(worker=0, number=1, version=40, clock=10), Payload(1, 2.5))
    assert (kinds(outcome), statuses(outcome)) == ([Restore], ["applied"])
    assert (numbered.shard.version, numbered.shard.minimum, numbered.store.value) == (40, 10, 2.5)


def test_a_joiner_is_waited_for_from_the_clock_it_enters_at():
    numbered = Numbered(Rule(0), 2)
    numbered.without(1)
    numbered.push(0, 0)
    numbered.view = ClusterView(2, (0, 1), ("server 0.0",), ((),), (0, 1))
    numbered.apply(Members(numbered.view))
    assert numbered.push(0, 1).moved, "it does not count before it has entered"
    outcome = numbered.apply(Enter(worker=1, life=1, number=9))
    assert [answer.entered for answer in outcome.answers] == [2]
    assert not numbered.push(0, 2).moved
    assert numbered.apply(Enter(worker=1, life=1, number=9, clock=3)).moved, "it goes on from a later step"


SAMPLES: list[Message] = [
    Push(worker=1, number=2, clock=3, settings=({"lr": 0.1, "betas": (0.9, 0.99)},)),
    Replicate(epoch=1, index=2, committed=1, entry=PushRefused(Push(worker=1, number=2, clock=3), "NaN")),
    Replicate(epoch=1, index=2, committed=1, entry=Members(ClusterView.of(2, 2, 1))),
    Viewed(ClusterView.of(3, 2, 2), 7),
    PushReply(number=1, status="late", version=3, clock=4, epoch=5),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: Message):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message


@given(st.data(), st.sampled_from([Rule(0), Rule(0, drop=1), Rule(0, deadline=1.0), Rule(2), Rule(None)]))
def test_the_same_entries_give_the_same_shard_and_use_each_gradient_once(data: st.DataObject, rule: Rule):
    """Random pushes, repeats, deaths and deadlines: two replicas agree, and a reader never misses what is promised."""
    one, two = Numbered(rule, 3), Numbered(rule, 3)
    clocks = dict.fromkeys(range(3), 0)
    for _ in range(data.draw(st.integers(1, 30))):
        worker = data.draw(st.integers(0, 2))
        action = data.draw(st.sampled_from(["push", "push", "push", "again", "deadline", "leave"]))
        before = one.shard.minimum
        for numbered in (one, two):
            if action == "push":
                numbered.push(worker, clocks[worker])
            elif action == "again" and numbered.numbers[worker]:
                numbered.numbers[worker] -= 1
                numbered.push(worker, clocks[worker])
            elif action == "deadline":
                numbered.apply(StepDeadline(numbered.shard.minimum))
            elif action == "leave" and len(numbered.view.workers) > 1:
                numbered.without(worker)
        if action == "push":
            clocks[worker] = max(clocks[worker] + 1, one.shard.minimum) if rule.closes else clocks[worker] + 1
            if rule.aggregated:
                clocks[worker] = min(clocks[worker], one.shard.minimum + 1)
        assert one.shard.minimum >= before
    assert one.store == two.store
    assert one.shard.counts == two.shard.counts
    assert len(set(one.store.used)) == len(one.store.used)

"""Loaders divided over workers: together they see what one process sees, batch by batch.

Workers are simulated in this process, one after the other, each with a loader of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_feed import Feed
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from offbeat.errors import DataError
from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.data.loaders import Batch, Share, divide
from offbeat.runtime.state.random_state import State, capture, seed_everything

SIZE = 23
"""Examples: no multiple of a batch or of a number of workers, and a last batch of 3."""
Make = Callable[[], Iterable[Any]]


Epochs = list[list[Batch]]


def worker(make: Make, rank: int, size: int, epochs: int = 2, **kwargs: Any) -> tuple[Epochs, Feed]:
    """What one worker gets in each epoch."""
    seed_everything(1000 + rank)  # Workers' own random state differs, as it does in a team.
    feed = Feed(rounds=kwargs.pop("rounds", None), starts=kwargs.pop("starts", None), follows=rank == 0)
    loader = divide(make(), [Share(rank, size, 5, 0)], feed, kwargs.pop("parts", Parts()), **kwargs)
    got: Epochs = []
    for _ in range(epochs):
        start = len(feed.given_out)
        contents = list(loader)
        batches = feed.given_out[start:]
        assert [id(batch.content) for batch in batches] == [id(content) for content in contents]
        got.append(batches)
    return got, feed


def team(make: Make, size: int, **kwargs: Any) -> list[Epochs]:
    """What every worker gets; streams that end at different times keep each other company."""
    starts: list[State] = []
    alone = [worker(make, rank, size, starts=starts, **kwargs)[1] for rank in range(size)]
    rounds = max((count for feed in alone for count in feed.lengths), default=0)
    starts = []
    return [worker(make, rank, size, rounds=rounds or None, starts=starts, **kwargs)[0] for rank in range(size)]


def plain(make: Make, epochs: int = 2) -> tuple[list[list[list[Any]]], State]:
    """What a script without a team gets that is seeded like worker 0, and the random state that it ends with."""
    seed_everything(1000)
    loader = make()
    return [[rows(content) for content in loader] for _ in range(epochs)], capture()


def rows(content: Any) -> list[Any]:
    """The examples of a batch as comparable values."""
    if isinstance(content, Tensor):
        return content.tolist()
    if isinstance(content, dict):
        return list(zip(*(rows(value) for value in content.values()), strict=True))
    if isinstance(content, list | tuple) and isinstance(content[0], Tensor):
        return list(zip(*(rows(value) for value in content), strict=True))
    return list(content)


def joined(ranks: list[Epochs], exact: bool = True) -> list[list[list[Any]]]:
    """For each epoch and batch: the examples that count, of all workers in order."""
    result: list[list[list[Any]]] = []
    for epoch in zip(*ranks, strict=True):
        assert len({len(batches) for batches in epoch}) == 1, "all workers end together"
        whole: list[list[Any]] = []
        for batches in zip(*epoch, strict=True):
            for batch in batches:
                assert len(rows(batch.content)) == (batch.examples or 1) or not exact
                assert batch.total in (None, sum(other.examples for other in batches))
            whole.append([row for batch in batches if batch.examples for row in rows(batch.content)])
        result.append(whole)
    return result


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, index * 10]), index


class Named(Pairs):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor(index), "y": torch.tensor(float(index)) / 7}


class Noisy(Pairs):
    """Random augmentation with all three global generators."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), float(np.random.rand()), random.random()])


class Stream(IterableDataset[Any]):
    """A stream that is shuffled by a global generator, and sharded over loading processes as torch's manual says."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        items = list(range(SIZE))
        random.shuffle(items)
        yield from (
            torch.tensor([i, torch.rand(()).item()]) for i in (items[info.id :: info.num_workers] if info else items)
        )


class Drawing:
    """A sampler of somebody's own, which draws from all three global generators as it goes."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(7):
            yield int(np.random.randint(SIZE))
            yield random.randrange(SIZE)
            yield int(torch.randint(SIZE, ()))

    def __len__(self) -> int:
        return 21


class Uneven:
    """A batch sampler of somebody's own: batches of different lengths, one of a single example."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()  # Drawn at once, not when the first batch is asked for.
        return iter([order[start:stop] for start, stop in [(0, 5), (5, 6), (6, 16), (16, SIZE)]])

    def __len__(self) -> int:
        return 4


class Batches:
    """Anything that can be iterated: finished batches, made with a global generator."""

    def __iter__(self) -> Iterator[Any]:
        for count in (4, 1, 6):
            yield torch.rand(count, 2), [f"name {i}" for i in range(count)]


def _given_generator() -> DataLoader[Any]:
    return DataLoader(Pairs(), 4, shuffle=True, generator=torch.Generator().manual_seed(9))


WEIGHTED = WeightedRandomSampler(torch.arange(1.0, SIZE + 1), 30)


KINDS: dict[str, Make] = {
    "shuffled": lambda: DataLoader(Pairs(), 4, shuffle=True),
    "sequential": lambda: DataLoader(Pairs(), 4, sampler=SequentialSampler(Pairs())),
    "drop_last": lambda: DataLoader(Pairs(), 4, shuffle=True, drop_last=True),
    "collate": lambda: DataLoader(Pairs(), 4, shuffle=True, collate_fn=lambda some: torch.stack([x for x, _ in some])),
    "batch_sampler": lambda: DataLoader(Pairs(), batch_sampler=Uneven()),
    "sampler": lambda: DataLoader(Pairs(), 4, sampler=Drawing()),
    "weighted": lambda: DataLoader(Pairs(), 4, sampler=WEIGHTED),
    "generator": _given_generator,
    "tensors": lambda: DataLoader(TensorDataset(torch.arange(SIZE), torch.arange(2 * SIZE).view(SIZE, 2)), 4, True),
    "dictionaries": lambda: DataLoader(Named(), 4, shuffle=True),
    "one_example_batches": lambda: DataLoader(Pairs(), 1, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "stream_drop_last": lambda: DataLoader(Stream(), 4, drop_last=True),
    "stream_of_batches": lambda: DataLoader(Whole4(), None),
    "finished_batches": lambda: DataLoader(Rows(), None, shuffle=True),
    "list": lambda: [torch.arange(count) for count in (4, 7, 1)],
    "factory": Batches,
}
PROCESSES: dict[str, Make] = {
    "shuffled": lambda: DataLoader(Pairs(), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Pairs(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), 4, num_workers=2),
    "persistent_stream": lambda: DataLoader(Stream(), 4, num_workers=2, persistent_workers=True),
    "stream_of_batches": lambda: DataLoader(Whole4(), None, num_workers=2),
}


class Whole4(IterableDataset[Any]):
    """A stream of finished batches."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for start in range(info.id if info else 0, 4, info.num_workers if info else 1):
            yield torch.rand(5, 1) + start


class Rows(Pairs):
    """A map-style dataset whose items are finished batches."""

    def __getitem__(self, index: int) -> Any:
        return torch.arange(index, index + 3), torch.rand(3)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_together_get_what_a_script_without_a_team_gets(kind: str) -> None:
    make = KINDS[kind]
    expected, _ = plain(make)
    assert sum(len(batch) for batch in expected[0]) > 10
    for size in (1, 2, 5):
        together = team(make, size)
        assert joined(together) == expected
        phantoms = [batch for epochs in together for batches in epochs for batch in batches if batch.examples == 0]
        assert all(len(rows(batch.content)) == 1 for batch in phantoms)
        assert phantoms or size < 5 or kind in ("finished_batches", "stream_of_batches"), "five share batches of four"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_worker_0_draws_on_where_a_script_without_a_team_would(kind: str, size: int) -> None:
    _, expected = plain(KINDS[kind])
    lengths = worker(KINDS[kind], 0, size, starts=[])[1].lengths
    worker(KINDS[kind], 0, size, starts=[], rounds=max(lengths) or None)
    assert repr(capture()) == repr(expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROCESSES)
def test_workers_with_loading_processes_together_get_what_a_script_without_a_team_gets(kind: str) -> None:
    expected, _ = plain(PROCESSES[kind])
    assert expected[0] != expected[1], "each epoch has its own order or its own noise"
    assert joined(team(PROCESSES[kind], 1)) == expected
    several = joined(team(PROCESSES[kind], 3))
    assert several[0] == expected[0]
    # From the second epoch on the seed says what several workers' processes draw that live on: so they can resume.
    assert several[1] == expected[1] or kind == "persistent_stream"
    assert several == joined(team(PROCESSES[kind], 2))


@pytest.mark.parametrize("kind", ["shuffled", "sampler", "weighted", "stream", "factory"])
def test_workers_that_do_not_meet_draw_what_the_seed_says(kind: str) -> None:
    alone = [worker(KINDS[kind], rank, 2)[1] for rank in range(2)]
    rounds = max(count for feed in alone for count in feed.lengths) or None
    first, second = (worker(KINDS[kind], rank, 2, rounds=rounds)[0] for rank in range(2))
    again = joined([worker(KINDS[kind], rank, 3, rounds=rounds)[0] for rank in range(3)])
    assert joined([first, second]) == again
    assert again[0] != again[1]


def test_an_evaluation_draws_on_worker_0_what_it_draws_without_a_team() -> None:
    def looked(loader: Iterable[Any]) -> str:
        seed_everything(3)
        with torch.no_grad():
            for _ in loader:
                pass
        return repr(capture())

    for kind in ("shuffled", "sequential", "weighted", "stream_of_batches"):
        expected = looked(KINDS[kind]())
        for size in (1, 2):
            share = Share(0, size, 5, 0)
            assert looked(divide(KINDS[kind](), [share], Feed(), Parts())) == expected or kind == "stream_of_batches"


@pytest.mark.parametrize("kind", ["shuffled", "sampler", "weighted", "generator", "stream", "factory"])
def test_every_epoch_is_reshuffled_by_the_seed(kind: str) -> None:
    first, second = joined(team(KINDS[kind], 2))
    assert first != second


def test_loaders_of_one_run_shuffle_differently() -> None:
    feeds = [Feed(), Feed()]
    for number, feed in enumerate(feeds):
        list(divide(DataLoader(Pairs(), 4, shuffle=True), [Share(0, 2, 5, number)], feed, Parts()))
    assert len({str([rows(batch.content) for batch in feed.given_out]) for feed in feeds}) == 2


def test_the_last_batch_is_known_where_the_sampler_tells() -> None:
    ((batches,), _) = worker(KINDS["shuffled"], 1, 2, epochs=1)
    assert [batch.last for batch in batches] == [False] * 5 + [True]
    assert [batch.total for batch in batches] == [4] * 5 + [3]


def test_indexing_tensors_gives_the_bits_that_collating_gives() -> None:
    data = TensorDataset(torch.rand(SIZE, 3, 2), torch.arange(SIZE), torch.rand(SIZE, dtype=torch.float64))

    class Same(TensorDataset):
        """Not exactly a TensorDataset, so that it takes the other way."""

    slow = Same(*data.tensors)
    for size in (1, 3):
        fast_epochs, slow_epochs = (
            team(lambda used=used: DataLoader(used, 4, sampler=Drawing()), size) for used in (data, slow)
        )
        for one, two in zip(fast_epochs[0][1], slow_epochs[0][1], strict=True):
            assert type(one.content) is type(two.content)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one.content, two.content, strict=True))


def test_a_loader_with_a_distributed_sampler_is_left_alone() -> None:
    for wrapped in (False, True):
        ranks: list[Epochs] = []
        for rank in range(2):
            sampler = DistributedSampler(Pairs(), 2, rank, shuffle=False)
            how: dict[str, Any] = (
                {"batch_sampler": BatchSampler(sampler, 4, False)} if wrapped else {"sampler": sampler}
            )
            ranks.append(worker(lambda how=how: DataLoader(Pairs(), **how), rank, 2, epochs=1)[0])
        got = sorted(row[1] for batches in joined(ranks) for batch in batches for row in batch)
        assert got == sorted([*range(SIZE), 0]), "the sampler itself repeats one example to make parts even"


def test_data_that_is_not_to_be_split_is_only_counted() -> None:
    got, _ = worker(lambda: [torch.arange(5), torch.tensor(3)], 1, 2, epochs=1, split=False, rounds=2)
    assert [batch.content.tolist() for batch in got[0]] == [[0, 1, 2, 3, 4], 3]
    assert [batch.examples for batch in got[0]] == [5, 1]


def test_streams_of_different_lengths_end_together_with_all_examples_counted() -> None:
    lengths = (1, 4, 2)
    ranks = [
        worker(lambda n=n: [torch.arange(n * 3)] * n, rank, 3, rounds=4, split=False)[0]
        for rank, n in enumerate(lengths)
    ]
    assert [len(batches) for epochs in ranks for batches in epochs] == [4] * 6
    counted = [sum(batch.examples for batch in epochs[0]) for epochs in ranks]
    assert counted == [n * n * 3 for n in lengths]


def test_a_worker_without_any_data_among_others_is_told() -> None:
    with pytest.raises(DataError, match="stream of data is empty while others have data"):
        worker(list, 0, 2, rounds=3, split=False)


def test_no_data_at_all_is_told() -> None:
    with pytest.raises(DataError, match=r"no batch at all .dataset of 23 examples.*Use a smaller batch"):
        worker(lambda: DataLoader(Pairs(), 64, drop_last=True), 0, 2)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("drop_last", "stream_drop_last")])
def test_an_evaluation_has_no_phantoms_and_its_union_is_exact(kind: str) -> None:
    def seen(size: int) -> list[Any]:
        found: list[Any] = []
        for rank in range(size):
            feed = Feed()
            loader = divide(KINDS[kind](), [Share(rank, size, 5, 0)], feed, Parts())
            with torch.no_grad():
                found += [row for content in loader for row in rows(content)]
            assert all(batch.examples for batch in feed.given_out)
            assert feed.looked == len(feed.given_out)
            assert (loader.epoch, feed.endings) == (0, 0), "an evaluation is not an epoch of training"
        return sorted(found, key=repr)

    assert seen(5) == seen(2)
    drawn = ("sampler", "weighted", "stream", "stream_of_batches", "finished_batches", "factory")
    assert seen(5) == seen(1) or kind in drawn, "one worker evaluates on what the script itself draws"


@pytest.mark.parametrize("kind", KINDS)
def test_iterating_does_not_disturb_the_processs_random_state(kind: str) -> None:
    loader = divide(KINDS[kind](), [Share(1, 2, 5, 0)], Feed(rounds=30), Parts())
    seed_everything(77)
    before = repr(capture())
    for _ in loader:
        pass
    assert repr(capture()) == before or kind == "finished_batches"
    seed_everything(77)
    stream = iter(loader)
    next(stream)
    stream.close()
    assert repr(capture()) == before


def test_attributes_and_length_are_those_of_the_users_loader() -> None:
    mine = DataLoader(Pairs(), 4, shuffle=True)
    loader = divide(mine, [Share(0, 2, 5, 0)], Feed(), Parts())
    assert len(loader) == 6
    assert loader.dataset is mine.dataset
    assert loader.sampler is mine.sampler
    assert loader.batch_size == 4
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing
    with pytest.raises(TypeError):
        len(divide(Batches(), [Share(0, 2, 5, 0)], Feed(), Parts()))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("persistent", [False, True])
def test_after_breaking_out_the_next_loop_begins_a_new_epoch(num_workers: int, persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        lasting = persistent and num_workers > 0
        return DataLoader(Pairs(), 4, shuffle=True, num_workers=num_workers, persistent_workers=lasting)

    (_, expected), _ = worker(make, 0, 2)
    feed = Feed()
    loader = divide(make(), [Share(0, 2, 5, 0)], feed, Parts())
    for number, _ in enumerate(loader):
        if number == 2:
            break
    assert (loader.epoch, loader.batches, loader.complete, feed.endings) == (1, 3, False, 1)
    assert [rows(content) for content in loader] == [rows(batch.content) for batch in expected]
    assert (loader.epoch, loader.batches, loader.complete, feed.endings) == (2, 6, True, 2)


@pytest.mark.parametrize("kind", ["shuffled", "stream", "processes"])
def test_nested_and_zipped_loops_keep_their_data_apart(kind: str) -> None:
    make = PROCESSES["shuffled"] if kind == "processes" else KINDS[kind]
    (first, second), _ = worker(make, 0, 2)
    feed = Feed()
    loader = divide(make(), [Share(0, 2, 5, 0)], feed, Parts())
    pairs = [(rows(one), rows(two)) for one, two in zip(loader, loader, strict=True)]
    assert [one for one, _ in pairs] == [rows(batch.content) for batch in first]
    assert [two for _, two in pairs] == [rows(batch.content) for batch in second]
    assert [batch.examples for batch in feed.given_out] == [
        b.examples for two in zip(first, second, strict=True) for b in two
    ]


def test_a_team_that_says_stop_ends_the_epoch_there() -> None:
    feed = Feed(limit=2)
    loader = divide(DataLoader(Pairs(), 4), [Share(0, 2, 5, 0)], feed, Parts())
    assert len(list(loader)) == 2
    assert not loader.complete
    assert list(loader) == []


def test_batches_that_were_learned_without_this_worker_are_left_out() -> None:
    feed = Feed()
    loader = divide(DataLoader(Pairs(), 4), [Share(0, 2, 5, 0)], feed, Parts())
    whole = [rows(content) for content in loader]
    seen: list[Any] = []
    for number, content in enumerate(loader):
        seen.append(rows(content))
        feed.missed = 2 if number == 0 else 0
    assert seen == [whole[0], *whole[3:]]
    assert [rows(batch.content) for batch in feed.left_out] == whole[1:3]
    assert loader.batches == len(whole), "it stands where the others stand"


def test_skewed_parts_give_every_example_once_and_each_worker_its_own() -> None:
    data = TensorDataset(torch.arange(SIZE), torch.arange(SIZE) % 3)
    for size in (2, 4):
        ranks = team(lambda: DataLoader(data, 4, sampler=RandomSampler(data)), size, parts=Parts(0.1))
        held = [{row[0] for batch in epoch if batch.examples for row in rows(batch.content)} for (epoch, _) in ranks]
        assert sorted(i for part in held for i in part) == list(range(SIZE))
        again = [{row[0] for batch in epoch if batch.examples for row in rows(batch.content)} for (_, epoch) in ranks]
        assert again == held, "a worker's part stays its own in every epoch"
        first, second = joined(ranks)
        assert first != second, "but its order changes"


def test_the_users_own_dataset_is_what_a_loading_process_shows() -> None:
    def begin(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert type(info.dataset) in (Stream, Pairs)
        info.dataset.begun = number  # type: ignore[attr-defined]

    for dataset in (Stream(), Pairs()):
        loader = divide(
            DataLoader(dataset, 4, num_workers=1, worker_init_fn=begin), [Share(0, 1, 5, 0)], Feed(), Parts()
        )
        assert len(list(loader)) == 6

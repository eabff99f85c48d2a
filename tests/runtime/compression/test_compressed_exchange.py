"""Compressed exchanges on real processes: the same sum on all workers, equal to that of the coders alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_support import weighted_sum
from own_scripts.compressing import MEANT, SEED, STEPS, net, own_gradients
from safetensors.torch import load_file

import offbeat
from offbeat.errors import StrategyError
from offbeat.protocols.compression import kept_of
from offbeat.protocols.partition import mixed
from offbeat.runtime.launch import Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.strategies import Axis, available, combined, parse
from offbeat.strategies.compressors import Compressing, compressor
from offbeat.tasks.digits import Digits

NAMES = [name for name, cls in available().items() if cls.axis is Axis.COMPRESSION]
TEXTS = [
    *("half", "bfloat", "quantize", "quantize(4)", "quantize(2, stochastic=True)", "sign", "topk(0.1)", "lowrank(2)"),
    *("threshold(0.05)", "randomk(0.25)", "topk(0.1) + quantize(8)", "threshold(0.05) + half", "randomk(0.5) + sign"),
    *("topk(0.1, feedback=False)", "randomk(0.25, feedback=False)"),
]


def compressions(text: str) -> Any:
    return combined(parse(text)).compressions


# --- which go together


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("half + topk", "half leaves codes"),
        ("quantize + sign", "quantize leaves codes"),
        ("topk + randomk", "randomk selects numbers, and topk has done that"),
        ("topk + lowrank", "lowrank needs whole tensors"),
        ("topk + half + sign", "half leaves codes"),
        ("single + topk", "single cannot compress what it sends"),
        ("ddp + topk", "ddp cannot compress what it sends"),
        ("hogwild + half", "hogwild cannot compress what it sends"),
        ("downpour + half", "downpour cannot compress what it sends"),
        ("allreduce(ring) + half", "a compressor decides how its messages are summed"),
        ("allreduce(shard=optimizer) + half", "a compressor sees them whole"),
        ("server + lowrank", "server sends each message to one receiver"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(StrategyError, match=reason):
        parse(text)


@pytest.mark.parametrize(
    "text", ["topk(0.0)", "topk(1.5)", "threshold(0.0)", "randomk(-0.1)", "lowrank(0)", "quantize(3)"]
)
def test_numbers_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(StrategyError):
        parse(text)


def test_sums_with_compressors_are_never_exact_and_keep_what_else_they_can() -> None:
    for name in NAMES:
        traits = combined(parse(name)).traits
        assert traits.synchronous
        assert traits.deterministic
        assert not traits.exact
        assert combined(parse(f"server + {name}")).traits.elastic if name != "lowrank" else True
    assert str(parse("powersgd(2)")) == "lowrank(2)"
    assert str(parse("topk(0.1, feedback=False) + quantize(4)")).startswith("allreduce + topk(0.1, feedback=False)")


def test_who_remembers_what_was_left_out() -> None:
    owing = {name for name in NAMES if compressions(name)[0].owes}
    assert owing == {"quantize", "sign", "topk", "threshold", "randomk", "lowrank"}
    assert not compressions("quantize(2, stochastic=True)")[0].owes
    assert compressions("half(feedback=True)")[0].owes


def test_workers_round_apart_and_draw_alike() -> None:
    row = torch.linspace(-1, 1, 500)

    def letters(text: str) -> list[torch.Tensor]:
        return [compressor(compressions(text), [(500,)], SEED, rank).encode(row) for rank in range(2)]

    assert not torch.equal(*letters("quantize(4, stochastic=True)"))
    assert torch.equal(*letters("randomk(0.1)"))


# --- allreduce


def go(launcher: Launcher, folder: Path, workers: int, apart: bool) -> dict[str, list[dict[str, Any]]]:
    """What each worker has seen of each strategy."""
    store = serve_store()
    roles = [
        Role(
            kind="worker",
            rank=rank,
            entry="own_scripts.compressing:run",
            config={"strategies": TEXTS, "apart": apart},
            environment=worker_environment(rank, workers, store.port),
            log=folder / f"{rank}.log",
            threads=1,
        )
        for rank in range(workers)
    ]
    seen: dict[str, list[dict[str, Any]]] = {text: [{}] * workers for text in (*TEXTS, "")}

    def note(_: Role, message: Mapping[str, Any]) -> None:
        seen[message["strategy"]][message["rank"]] = dict(message)

    launcher.run(roles, on_message=note)
    return seen


def reference(text: str, workers: int) -> list[list[list[float] | None]]:
    """The same sums, made of the coders alone in this process."""
    shapes = [tuple(p.shape) for p in net().parameters()]
    sizes = [p.numel() for p in net().parameters()]
    seed = mixed(SEED, 0, 0)
    parts: list[Compressing] = compressions(text)
    feedbacks = [compressor(parts, shapes, seed, rank) for rank in range(workers)]
    total = sum(range(1, workers + 1))
    found: list[list[list[float] | None]] = []
    for step in range(STEPS):
        rows, used = [], [False] * len(sizes)
        for rank in range(workers):
            gradients = own_gradients(step, rank)
            used = [was or g is not None for was, g in zip(used, gradients, strict=True)]
            filled = [torch.zeros(s) if g is None else g.reshape(-1) for g, s in zip(gradients, sizes, strict=True)]
            rows.append(torch.cat(filled))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        idle = [slice(a, a + s) for a, s, u in zip(starts, sizes, used, strict=True) if not u]
        weights = [(rank + 1) / total for rank in range(workers)]
        pieces = weighted_sum(feedbacks, rows, weights, idle)[0].split(sizes)
        found.append([piece.tolist() if u else None for piece, u in zip(pieces, used, strict=True)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "apart"), [(2, False), (3, False), (2, True)])
def test_allreduce_hands_back_what_the_coders_say_the_same_on_all_workers(
    launcher: Launcher, tmp_path: Path, workers: int, apart: bool
) -> None:
    seen = go(launcher, tmp_path, workers, apart)
    assert [one["shares"] for one in seen.pop("")] == [not apart] * workers
    for text, ranks in seen.items():
        expected = reference(text, workers)
        for one in ranks:
            assert one["sums"] == ranks[0]["sums"], f"{text}: workers differ"
            assert one["mean"] == ranks[0]["mean"], f"{text}: workers differ"
            assert one["compression"]["sums"] == STEPS + 1, f"{text}: sums of gradients, and a mean"
        for step in range(STEPS):
            for mine, theirs in zip(ranks[0]["sums"][step], expected[step], strict=True):
                assert (mine is None) == (theirs is None), text
                # Sums of halves differ by the order in which they were added.
                tolerance = 0.02 if "half" in text or "bfloat" in text else 1e-5
                assert mine is None or mine == pytest.approx(theirs, abs=tolerance, rel=tolerance), text


@pytest.mark.slow
def test_letters_are_what_is_counted(launcher: Launcher, tmp_path: Path) -> None:
    numbers = sum(p.numel() for p in net().parameters())
    kept = STEPS * kept_of(numbers, 0.1) + kept_of(MEANT, 0.1)
    for one in go(launcher, tmp_path, 2, apart=False)["topk(0.1)"]:
        assert one["compression"]["letter_bytes"] == kept * 8
        assert one["compression"]["dense_bytes"] == 4 * (STEPS * numbers + MEANT)
        assert one["compression"]["coding_seconds"] > 0


# --- learning


def learned(launcher: Launcher, folder: Path, strategy: str, **more: Any) -> offbeat.Result:
    options: dict[str, Any] = {"workers": 2, "seed": 1, "epochs": 20, "launcher": launcher, "out": folder} | more
    return offbeat.fit(Digits(), strategy, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "quantize(2)", "quantize(4, stochastic=True)", "topk + quantize"])
def test_digits_are_learned_with_every_compressor(name: str, launcher: Launcher, tmp_path: Path) -> None:
    result = learned(launcher, tmp_path, name)
    assert result.reached_target, f"{name} came to {result.score}"
    assert result.compression["letter_bytes"] < result.compression["dense_bytes"]


@pytest.mark.slow
def test_without_feedback_what_is_small_is_never_learned(launcher: Launcher, tmp_path: Path) -> None:
    with_memory = learned(launcher, tmp_path, "threshold(0.1)", epochs=12)
    without = learned(launcher, tmp_path, "threshold(0.1, feedback=False)", epochs=12)
    assert with_memory.reached_target
    assert not without.reached_target
    assert without.best_score is not None
    assert without.best_score < 0.96


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["server + topk(0.05)", "server(shards=2, consistency=ssp(1)) + quantize(4)"])
def test_servers_learn_from_letters(strategy: str, launcher: Launcher, tmp_path: Path) -> None:
    result = learned(launcher, tmp_path, strategy)
    assert result.reached_target
    assert result.refusals == []
    numbers = sum(p.numel() for p in Digits().model().parameters())
    pushed = sum(
        link["received"] for shard in result.servers for name, link in shard["links"].items() if "worker" in name
    )
    assert pushed < 0.25 * result.steps * result.workers * numbers * 4, "pushes are letters"


@pytest.mark.slow
def test_what_is_owed_to_servers_outlives_a_resume(launcher: Launcher, tmp_path: Path) -> None:
    """With one worker pushes come in one order, so that bits can be compared."""

    def model(result: offbeat.Result) -> dict[str, torch.Tensor]:
        return load_file(Path(result.run) / MODEL_FILE)

    once: dict[str, Any] = {"workers": 1, "checkpoint_every": 100}
    whole = model(learned(launcher, tmp_path / "whole", "server + topk(0.05)", steps=9, **once))
    cut = learned(launcher, tmp_path / "cut", "server + topk(0.05)", steps=5, **once)
    assert not all(torch.equal(whole[name], value) for name, value in model(cut).items())
    resumed = model(learned(launcher, tmp_path / "cut", "server + topk(0.05)", steps=9, resume=cut.run, **once))
    assert all(torch.equal(whole[name], value) for name, value in resumed.items())

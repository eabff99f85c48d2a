"""What processes compute with split parts: losses, logits and attention, compared with torch's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.tensor_parallel import logits as logits_module
from offbeat.runtime.tensor_parallel.apply import apply
from offbeat.runtime.tensor_parallel.layers import cut_of
from offbeat.runtime.tensor_parallel.plan import plan

CLASSES = 7
TARGET = torch.tensor([[0, 6, 3, -100], [2, 5, 1, 4]])
SHARES = torch.softmax(torch.arange(8.0 * CLASSES, dtype=torch.float64).view(8, CLASSES).sin(), -1)
WEIGHTS = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
SPLIT_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: functional.cross_entropy(x.flatten(0, 1), TARGET.flatten()),
    "module": lambda x: nn.CrossEntropyLoss()(x.view(-1, CLASSES), TARGET.view(-1)),
    "sum": lambda x: functional.cross_entropy(x.reshape(8, -1), TARGET.flatten(), reduction="sum"),
    "none": lambda x: (functional.cross_entropy(x.flatten(0, 1), TARGET.flatten(), reduction="none") ** 2).sum(),
    "smoothed": lambda x: functional.cross_entropy(x.flatten(0, 1), TARGET.flatten(), label_smoothing=0.2),
    "ignored": lambda x: functional.cross_entropy(x.flatten(0, 1), TARGET.flatten().clamp(min=0), ignore_index=3),
    "shifted": lambda x: functional.cross_entropy(x[:, :-1].contiguous().view(-1, CLASSES), TARGET[:, 1:].flatten()),
    "last": lambda x: functional.cross_entropy(x[..., -1, :].float(), TARGET[:, -1]),
    "some": lambda x: functional.cross_entropy(x[TARGET > 2], TARGET[TARGET > 2]),
}
GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": lambda x: functional.cross_entropy(x.flatten(0, 1), TARGET.flatten(), WEIGHTS),
    "shares": lambda x: functional.cross_entropy(x.flatten(0, 1), SHARES),
    "transposed": lambda x: functional.cross_entropy(x.transpose(1, 2), TARGET),
    "square": lambda x: (x * x).mean() + x[..., 2].sum() + x[..., ::3].sum(),
    "softmax": lambda x: torch.log_softmax(x, -1).flatten().sin().sum(),
    "argmax": lambda x: x.sum() + x.argmax(-1).sum(),
}


def agree(first: nn.Module, second: nn.Module, way: int, ways: int) -> float:
    """How far apart the gradients of a whole and of a split model are."""
    apart = 0.0
    for (name, whole), (other, part) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert name == other
        if whole.grad is None:
            assert part.grad is None, name
            continue
        cut = cut_of(part)
        expected = whole.grad if cut is None else cut.part(whole.grad, way, ways)
        assert part.grad is not None, name
        apart = max(apart, float((expected - part.grad).abs().max()))
    return apart


def losses(config: Mapping[str, Any], control: Control) -> None:
    """Losses of logits that are split, and what gathering did."""
    del config
    group = DirectGroup(where(), timedelta(seconds=60), torch.device("cpu"))
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, CLASSES)).double()
    gathered = [0]
    real = logits_module.gather

    def counted(*args: Any) -> Any:
        gathered[0] += 1
        return real(*args)

    logits_module.gather = counted
    inputs = torch.arange(8).view(2, 4)
    for name, loss in (SPLIT_LOSSES | GATHERED).items():
        whole, split = copy.deepcopy(plain), copy.deepcopy(plain)
        apply(plan(split, group.size, {"0": "vocabulary", "1": "vocabulary"}), split, group)
        gathered[0] = 0
        expected, found = loss(whole(inputs)), loss(split(inputs))
        expected.backward()
        found.backward()
        apart = max(float((expected - found).abs().detach()), agree(whole, split, group.rank, group.size))
        control.send({"loss": name, "apart": apart, "gathered": gathered[0]})
    apply(plan(plain, group.size, {"0": "vocabulary", "1": "vocabulary"}), plain, group)
    try:
        plain(torch.tensor([9]))
    except IndexError as error:
        control.send({"refused": str(error)})
    group.close()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch first": ({"batch_first": True}, {}),
    "weights": ({"batch_first": True}, {"need_weights": True}),
    "weights of heads": ({}, {"need_weights": True, "average_attn_weights": False}),
    "causal": ({"batch_first": True}, {"attn_mask": "causal", "is_causal": True}),
    "masks of heads": ({}, {"attn_mask": "heads", "key_padding_mask": "last"}),
    "other widths": ({"kdim": 5, "vdim": 3, "bias": False}, {}),
    "unbatched": ({}, {"unbatched": True, "need_weights": True}),
    "dropout": ({"dropout": 0.3}, {}),
    "dropout of weights": ({"dropout": 0.3, "batch_first": True}, {"need_weights": True}),
}


def attention(config: Mapping[str, Any], control: Control) -> None:
    """`nn.MultiheadAttention` in all its forms."""
    del config
    warnings.simplefilter("ignore")
    group = DirectGroup(where(), timedelta(seconds=60), torch.device("cpu"))
    for name, (made, called) in CASES.items():
        torch.manual_seed(0)
        whole: Any = nn.ModuleList([nn.MultiheadAttention(8, 4, **made)]).double()
        split: Any = copy.deepcopy(whole)
        apply(plan(split, group.size), split, group)
        options = dict(called)
        first, unbatched = made.get("batch_first", False), options.pop("unbatched", False)
        places, sources = (3, 3) if "kdim" not in made else (3, 5)
        shapes = [(places, 8), (sources, made.get("kdim", 8)), (sources, made.get("vdim", 8))]
        query, key, value = (
            torch.randn(shape if unbatched else ((2, *shape) if first else (shape[0], 2, shape[1])), dtype=torch.double)
            for shape in shapes
        )
        if "kdim" not in made and not unbatched:
            key = value = query
        masks = {
            "causal": torch.ones(places, places).triu(1).bool(),
            "heads": torch.randn(2 * 4, places, sources, dtype=torch.double),
        }
        if "attn_mask" in options:
            options["attn_mask"] = masks[options["attn_mask"]]
        if "key_padding_mask" in options:
            options["key_padding_mask"] = torch.tensor([[False] * sources, [False] * (sources - 1) + [True]])
        options.setdefault("need_weights", False)
        apart = 0.0
        results: list[Any] = []
        for model in (whole, split):
            torch.manual_seed(7)
            output, weights = model[0](query, key, value, **options)
            (output.sin().sum() + (weights.cos().sum() if weights is not None else 0)).backward()
            results.append((output.detach(), weights if weights is None else weights.detach()))
        for expected, found in zip(*results, strict=True):
            assert (expected is None) == (found is None)
            apart = apart if expected is None else max(apart, float((expected - found).abs().max()))
        control.send({"case": name, "apart": max(apart, agree(whole, split, group.rank, group.size))})
    group.close()


def copies(config: Mapping[str, Any], control: Control) -> None:
    """A split model made whole for a while, changed there, copied; and an optimizer with it."""
    del config
    group = DirectGroup(where(), timedelta(seconds=60), torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    plain = copy.deepcopy(model)
    inputs = torch.randn(3, 4, dtype=torch.double)
    optimizer = torch.optim.AdamW(model.parameters())
    split = apply(plan(model, group.size), model, group)
    model(inputs).sum().backward()
    optimizer.step()
    shapes = [list(p.shape) for p in model.parameters()]
    with split.whole([optimizer]):
        whole = [list(p.shape) for p in model.parameters()]
        state = [list(optimizer.state[p]["exp_avg"].shape) for p in model.parameters()]
        model.load_state_dict(plain.state_dict())
        inside = float((model(inputs) - plain(inputs)).abs().max())
    after = [list(optimizer.state[p]["exp_avg"].shape) for p in model.parameters()]
    copied = copy.deepcopy(model)
    outside = max(float((other(inputs) - plain(inputs)).abs().max()) for other in (model, copied))
    control.send(
        {
            "shapes": shapes, "whole": whole, "state": state, "after": after,
            "inside": inside, "outside": outside,
        }
    )  # fmt: skip
    group.close()

"""Models that are split in tests, and what their parts compute when run one after another in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from offbeat.runtime.split.stages import SplitModel, Value
from offbeat.tasks.text import Text

Batch = tuple[Any, ...]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += x
        return self.relu(y)


class Convolutions(nn.Module):
    """With skip connections, one of them from the first block to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.stem(x)
        for block in self.blocks:
            x = block(x)
        pooled = functional.adaptive_avg_pool2d(x + first, 1).flatten(1)
        return self.head(self.dropout(pooled))


class Blocks(nn.Module):
    """A loop over blocks, sizes read from the batch, a mask that every block needs, a tied read-out, two outputs."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.out = nn.Linear(16, 20)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> dict[str, Any]:
        _, length = ids.shape
        x = self.embedding(ids) * 16**0.5 + torch.sin(torch.arange(length))[None, :, None]
        mask = torch.full((length, length), float("-inf")).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return {"logits": self.out(x), "rest": (x, None, "hidden")}


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
        self.out = nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask)
        return self.out(x)


class Hourglass(nn.Module):
    """Sizes of earlier values decide those of later ones; skips cross several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, padding=1, stride=2) for c in (4, 8))
        self.up = nn.ModuleList(nn.Conv2d(c, c // 2, 3, padding=1) for c in (16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.into(x), []
        for down in self.down:
            skips.append(x)
            x = functional.relu(down(x))
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = functional.interpolate(up(x), size=skip.shape[-2:], mode="nearest") + skip
        return x


class Functional(nn.Module):
    """No modules but one: parameters in a list, a buffer that counts, random numbers, a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for weight in self.weights:
            with torch.no_grad():
                scale = x.abs().mean()
            x = functional.dropout(torch.tanh(x @ weight) / (1 + scale), 0.3, self.training)
        return self.norm(x)


class Repeated(nn.Module):
    """Modules that are used several times; a dictionary goes in, and nested structures come out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        mask = batch["mask"][..., None]
        x = self.embedding(batch["ids"])
        for _ in range(3):
            x = self.relu(self.linear(x)) * mask
        x[:, 0] = x[:, 0] * 2
        return {"mean": x.sum(1) / mask.sum(1).clamp(min=1), "pair": [(x * 2, mask), None]}


class Cube(torch.autograd.Function):
    """Its gradient is wrong on purpose: only by using it can a part have the model's gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * gradient


class Unusual(nn.Module):
    """An autograd function of its own, recomputation, normalized weights, a loop in a module without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.normalized = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.again = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.halving = Halving()

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalized(Cube.apply(self.first(x)))
        x = torch.utils.checkpoint.checkpoint(self.again, x, use_reentrant=False)
        return self.halving(x)


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        while x.abs().max() > 1:  # Depends on the data, and is nobody else's business.
            x = x / 2
        return x


def tied_text() -> nn.Module:
    """The bundled transformer, its read-out tied to its embedding."""
    model = Text(layers=2, width=16, context=16).model()
    model[-1].weight = model[0].symbol.weight
    return model


def mlp() -> nn.Module:
    inner = nn.Sequential(nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16))
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 16), inner, nn.ReLU(inplace=True), nn.Linear(16, 4))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def ids(rows: int, length: int, symbols: int = 20) -> Tensor:
    return torch.randint(0, symbols, (rows, length))


def pixels(rows: int, length: int) -> Batch:
    return (torch.randn(rows, 3, 4 * length, 4 * length),)


def labelled(rows: int, length: int) -> Batch:
    return ({"ids": ids(rows, length), "mask": torch.randint(0, 2, (rows, length)).float()},)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "mlp": (mlp, lambda rows, _: (torch.randn(rows, 2, 4),)),
    "convolutions": (Convolutions, pixels),
    "text": (lambda: Text(layers=2, width=16, context=16).model(), lambda rows, length: (ids(rows, length, 96),)),
    "tied_text": (tied_text, lambda rows, length: (ids(rows, length, 96),)),
    "encoder": (encoder, lambda rows, length: (torch.randn(rows, length, 16),)),
    "translator": (Translator, lambda rows, length: (ids(rows, length), ids(rows, length + 1))),
    "blocks": (Blocks, lambda rows, length: (ids(rows, length),)),
    "hourglass": (Hourglass, pixels),
    "functional": (Functional, lambda rows, length: (torch.randn(rows, length, 8),)),
    "repeated": (Repeated, labelled),
    "unusual": (Unusual, lambda rows, _: (torch.randn(rows, 8),)),
}


def in_double(batch: Batch) -> Batch:
    return pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


def loss_of(output: Any) -> Tensor:
    """Something that depends on all tensors of an output."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([(tensor**2).mean() + tensor.sum() / 100 for tensor in tensors]).sum()


def run_parts(split: SplitModel, batch: Batch, *, backward: bool = True) -> Any:
    """The output of the parts run one after another; gradients are left in the parameters.

    No gradient passes from part to part but by what each gives back for what it took, as between processes.
    """
    values: dict[tuple[int, int], Tensor] = {(-1, i): tensor for i, tensor in enumerate(split.inputs(*batch))}
    taken: list[dict[Value, Tensor]] = []
    for number, part in enumerate(split.parts):
        leaves = {v: values[v.producer, v.index].detach() for v in part.takes}
        taken.append({v: leaf.requires_grad_(v.differentiable and v.producer >= 0) for v, leaf in leaves.items()})
        given = part(*taken[-1].values())
        assert len(given) == len(part.gives)
        values |= {(number, value.index): tensor for value, tensor in zip(part.gives, given, strict=True)}
    last = len(split.parts) - 1
    finals = [values[last, v.index].detach().requires_grad_(v.differentiable) for v in split.parts[-1].gives]
    output = split.restore(finals)
    if not backward:
        return output
    loss_of(output).backward()
    for number in range(last, -1, -1):
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for value in split.parts[number].gives:
            uses = [leaves[value] for leaves in taken[number + 1 :] if value in leaves]
            back = [leaf.grad for leaf in (uses if number < last else [finals[value.index]]) if leaf.grad is not None]
            if value.differentiable and back:
                roots.append(values[number, value.index])
                gradients.append(torch.stack(back).sum(0))
        torch.autograd.backward(roots, gradients)
    return output

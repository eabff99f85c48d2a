"""Models that tests split over ways, and processes that train them split and whole.

Reachable in the processes because sys.path is passed on.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.tensor_parallel.apply import apply
from offbeat.runtime.tensor_parallel.layers import cut_of
from offbeat.runtime.tensor_parallel.plan import plan
from offbeat.runtime.tensor_parallel.state import (
    global_norm,
    load_logical_optimizer_state,
    load_logical_state,
    logical_optimizer_state,
    logical_state,
)
from offbeat.tasks.text import Text

SYMBOLS = 1003
"""A vocabulary that no number of ways divides."""
Batch = tuple[Tensor, Tensor]


class TiedText(nn.Module):
    """A text transformer whose embedding is its output layer, too; with dropout everywhere."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, 32, padding_idx=900)
        self.place = nn.Parameter(torch.randn(12, 32) * 0.1)
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, functional.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(32, SYMBOLS)
        self.output.weight = self.symbol.weight

    def forward(self, inputs: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], dtype=self.place.dtype)
        embedded = self.drop(self.symbol(inputs) + self.place[: inputs.shape[1]])
        return self.output(self.layers(embedded, mask, is_causal=True))


class Translator(nn.Module):
    """`nn.Transformer` with padding: encoder and decoder layers, attention to both."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(40, 16)
        self.inner = nn.Transformer(16, 4, 1, 2, 32, 0.1)
        self.output = nn.Linear(16, 40)

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.symbol(inputs.t())
        padding = torch.zeros(inputs.shape, dtype=torch.bool)
        padding[0, -2:] = True
        return self.output(self.inner(seen, seen, src_key_padding_mask=padding)).transpose(0, 1)


def mlp() -> nn.Module:
    middle = (nn.Linear(32, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 16), nn.LayerNorm(16))
    return nn.Sequential(nn.Linear(20, 32), nn.GELU(), *middle, nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 10))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _Logits(GPT2LMHeadModel(GPT2Config(vocab_size=SYMBOLS, n_positions=16, n_embd=32, n_layer=2, n_head=4)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _Logits(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=SYMBOLS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
                num_key_value_heads=4, max_position_embeddings=16, attention_dropout=0.1, pad_token_id=0,
                bos_token_id=1, eos_token_id=2,
            )
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return _Logits(
        BertForMaskedLM(
            BertConfig(
                vocab_size=SYMBOLS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                max_position_embeddings=16, pad_token_id=0,
            )
        )
    )  # fmt: skip


class _Logits(nn.Module):
    """A model of transformers by its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(input_ids=inputs).logits


def text() -> nn.Module:
    return Text(width=32, heads=4).model()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "tied text": TiedText, "translator": Translator, "text": text,
    "gpt2": gpt2, "llama": llama, "bert": bert,
}  # fmt: skip
OWN: dict[str, Callable[[nn.Module], Mapping[str, str]]] = {
    "text": lambda model: Text(width=32, heads=4).tensor_plan(model)
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.003, eps=1e-5),
}


def batches(name: str, count: int, dtype: torch.dtype) -> list[Batch]:
    random = torch.Generator().manual_seed(5)
    if name == "mlp":
        return [
            (torch.randn(6, 20, generator=random, dtype=dtype), torch.randint(0, 10, (6,), generator=random))
            for _ in range(count)
        ]
    symbols = {"text": 97, "translator": 40}.get(name, SYMBOLS)
    drawn = [torch.randint(0, symbols, (3, 13), generator=random) for _ in range(count)]
    return [(each[:, :-1], each[:, 1:].masked_fill(each[:, 1:] % 11 == 0, -100)) for each in drawn]


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


Clip = Callable[[nn.Module], Any]


def train(model: nn.Module, optimizer: Optimizer, work: list[Batch], clip: Clip, seed: int) -> list[float]:
    torch.manual_seed(seed)
    losses: list[float] = []
    for inputs, target in work:
        optimizer.zero_grad()
        loss = criterion(model(inputs), target)
        loss.backward()
        clip(model)
        optimizer.step()
        losses.append(float(loss))
    return losses


def compare(config: Mapping[str, Any], control: Control) -> None:
    """Train a model whole and split; say how far apart they are, and what else tests want to know."""
    warnings.simplefilter("ignore")
    dtype, name, ways = getattr(torch, config["dtype"]), config["model"], where().size
    group = DirectGroup(where(), timedelta(seconds=60), torch.device("cpu"))
    torch.manual_seed(0)
    plain = MODELS[name]().to(dtype)
    before = copy.deepcopy(plain.state_dict())
    split = copy.deepcopy(plain)
    work = batches(name, config["steps"], dtype)
    optimizer = OPTIMIZERS[config["optimizer"]](plain.parameters())
    losses = train(plain, optimizer, work, lambda model: clip_grad_norm_(model.parameters(), 0.5), 1)

    # The optimizer has the parameters before they are split, as in `team.prepare(model, optimizer)`.
    own = OPTIMIZERS[config["optimizer"]](split.parameters())
    planned = plan(split, ways, OWN[name](split) if name in OWN else None)
    apply(planned, split, group)
    half = len(work) // 2
    norms: list[float] = []

    def clip(model: nn.Module) -> None:
        ours = global_norm(model.parameters(), group)
        norms.append(abs(float(ours - clip_grad_norm_(model.parameters(), 0.5))))

    split_losses = train(split, own, work[:half], clip, 1)
    random = torch.get_rng_state()
    # Halfway, everything is saved and loaded: a checkpoint knows no layout.
    state, optimizer_state = logical_state(split, group), logical_optimizer_state(own, group)
    resumed = copy.deepcopy(plain)
    resumed_by = OPTIMIZERS[config["optimizer"]](resumed.parameters())
    again = plan(resumed, ways, OWN[name](resumed) if name in OWN else None)
    apply(again, resumed, group)
    load_logical_state(resumed, state, group)
    load_logical_optimizer_state(resumed_by, optimizer_state, group)
    torch.manual_seed(1)
    split_losses += continue_with(resumed, resumed_by, work[half:], clip, random)
    replicated = torch.stack([p.detach().double().sum() for p in resumed.parameters() if cut_of(p) is None])
    table = group.gather(replicated.tolist(), "a comparison")
    after = logical_state(resumed, group)
    with torch.no_grad():
        plain.eval()
        resumed.eval()
        apart = (plain(work[0][0]) - (resumed(work[0][0]) + 0)).abs().max()
    control.send(
        {
            "apart": max(float((after[key] - value).abs().max()) for key, value in plain.state_dict().items()),
            "moved": max(float((before[key] - value).abs().max()) for key, value in plain.state_dict().items()),
            "losses apart": max(abs(a - b) for a, b in zip(losses, split_losses, strict=True)),
            "outputs apart": float(apart),
            "norms apart": max(norms),
            "replicas equal": bool((table == table[0]).all()),
            "same names": list(after) == list(plain.state_dict()),
            "held": sum(p.numel() for p in resumed.parameters()) / planned.parameters,
            "share": planned.share,
        }
    )
    group.close()


def continue_with(model: nn.Module, optimizer: Optimizer, work: list[Batch], clip: Clip, random: Tensor) -> list[float]:
    """Train on from the random state of a checkpoint."""
    losses: list[float] = []
    torch.set_rng_state(random)
    for inputs, target in work:
        optimizer.zero_grad()
        loss = criterion(model(inputs), target)
        loss.backward()
        clip(model)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses

"""Modules that are known by their class or by the names of their parts: attention, feed-forward, vocabularies."""

from __future__ import annotations

from typing import Any

from torch import nn

from offbeat.runtime.tensor_parallel.attention import why_whole
from offbeat.runtime.tensor_parallel.chains import elementwise
from offbeat.runtime.tensor_parallel.layers import is_linear, widths
from offbeat.runtime.tensor_parallel.splits import Manner, Split

SMALL_VOCABULARY = 512
"""Below this many rows, the sums of a split vocabulary cost more than its products."""
_OUT = ("o_proj", "out_proj", "dense")
_HEADS = ("num_heads", "n_head", "n_heads", "nhead", "heads", "num_attention_heads")
_WIDTHS = ("split_size", "all_head_size")
Whole = dict[str, str]
"""Modules that stay whole, and why."""


def attention_of(name: str, module: Any, whole: Whole) -> list[Split]:
    """Splits of a module if it is attention of a known kind."""
    if isinstance(module, nn.MultiheadAttention):
        reason = why_whole(module)
        if reason:
            whole[name] = reason
            return []
        return [Split(name, Manner.HEADS, module.num_heads, "heads", name)]
    parts = dict(module.named_children())
    if {"q_proj", "k_proj", "v_proj"} <= parts.keys() and isinstance(getattr(module, "head_dim", None), int):
        outputs = [part for part in _OUT if part in parts]
        if outputs:
            return _separate(name, module, name, ("q_proj", "k_proj", "v_proj"), f"{name}.{outputs[0]}", whole)
    if {"c_attn", "c_proj"} <= parts.keys() and hasattr(module, "split_size"):
        return _fused(name, module)
    inner: Any = parts.get("self")
    if inner is not None and {"query", "key", "value"} <= dict(inner.named_children()).keys():
        after: Any = parts.get("output")
        if after is not None and hasattr(after, "dense") and hasattr(inner, "attention_head_size"):
            return _separate(f"{name}.self", inner, name, ("query", "key", "value"), f"{name}.output.dense", whole)
    return []


def _separate(
    name: str, module: Any, chain: str, parts: tuple[str, str, str], output: str, whole: Whole
) -> list[Split]:
    """Attention with a linear layer each for query, key and value (BERT, Llama)."""
    width = int(getattr(module, "head_dim", 0) or module.attention_head_size)
    layers: list[Any] = [module.get_submodule(part) for part in parts]
    if not all(is_linear(layer) for layer in layers):
        whole[name] = "its projections are not plain linear layers"
        return []
    # Weights that belong to a head's features are shared by all heads; others reach over heads.
    for part, child in module.named_children():
        if part not in parts and not is_linear(child) and any(p.numel() != width for p in child.parameters()):
            whole[name] = f"{part} has parameters for all heads together"
            return []
    heads = [widths(layer)[1] // width for layer in layers]
    splits = [
        Split(f"{name}.{part}", Manner.COLUMN, own, "heads", chain, enters=name)
        for part, own in zip(parts, heads, strict=True)
    ]
    known = tuple(
        each for each in (*_HEADS, *_WIDTHS, "num_key_value_heads") if isinstance(vars(module).get(each), int)
    )
    region = Split(name, Manner.HEADS, heads[0], "heads", chain, attributes=known)
    return [region, *splits, Split(output, Manner.ROW, heads[0], "heads", chain)]


def _fused(name: str, module: Any) -> list[Split]:
    """Attention with one layer for query, key and value (GPT-2)."""
    heads = int(module.num_heads)
    region = Split(name, Manner.HEADS, heads, "heads", name, attributes=("num_heads", "split_size"))
    blocks = widths(module.c_attn)[1] // int(module.split_size)
    splits = [region, Split(f"{name}.c_attn", Manner.COLUMN, heads, "heads", name, blocks)]
    if hasattr(module, "q_attn"):
        splits.append(Split(f"{name}.q_attn", Manner.COLUMN, heads, "heads", name))
    return [*splits, Split(f"{name}.c_proj", Manner.ROW, heads, "heads", name)]


def fused_by_user(name: str, model: nn.Module) -> list[Split]:
    """A linear layer that computes query, key and value at once, in a module that says how many heads it has."""
    parent = name.rpartition(".")[0]
    module: Any = model.get_submodule(parent)
    known = tuple(each for each in (*_HEADS, *_WIDTHS) if isinstance(vars(module).get(each), int))
    heads = next((int(getattr(module, each)) for each in known if each in _HEADS), 0)
    if not heads:
        return []
    region = Split(parent, Manner.HEADS, heads, "heads", parent, attributes=known)
    return [region, Split(name, Manner.COLUMN, heads, "heads", parent, 3)]


def feed_forward_of(name: str, module: Any, whole: Whole) -> list[Split]:
    """Splits of a module if it is a feed-forward part that is known by its class or names."""
    first, last, dropout, activation = "linear1", "linear2", "", None
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        activation, dropout = module.activation, "dropout"
    else:
        before, after = (getattr(module, part, None) for part in ("intermediate", "output"))
        if not (isinstance(before, nn.Module) and isinstance(after, nn.Module) and hasattr(before, "dense")):
            return []
        if not hasattr(after, "dense"):
            return []
        first, last, activation = "intermediate.dense", "output.dense", getattr(before, "intermediate_act_fn", None)
        if activation is None:
            return []
    first, last = f"{name}.{first}" if name else first, f"{name}.{last}" if name else last
    # transformers writes its activations as modules without parameters.
    own = isinstance(activation, nn.Module) and type(activation).__module__ == "transformers.activations"
    if not (own or elementwise(activation)):
        whole[first] = f"the activation {activation!r} after it is not known to treat every number by itself"
        return []
    linear = module.get_submodule(first[len(name) + 1 :] if name else first)
    size = widths(linear)[1]
    splits = [Split(first, Manner.COLUMN, size, "features", first), Split(last, Manner.ROW, size, "features", first)]
    if dropout:
        splits.append(Split(f"{name}.{dropout}" if name else dropout, Manner.COLUMN, size, "features", first))
    return splits


def vocabularies(model: nn.Module, whole: Whole) -> list[Split]:
    """Embeddings and output layers of the same vocabulary."""
    embeddings = {name: part for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    outputs: dict[str, Any] = {name: part for name, part in model.named_modules() if is_linear(part)}
    splits: list[Split] = []
    for name, embedding in embeddings.items():
        rows, width = embedding.num_embeddings, embedding.embedding_dim
        tied = [own for own, layer in outputs.items() if layer.weight is embedding.weight]
        alike = tied or [own for own, layer in outputs.items() if widths(layer) == (width, rows)]
        if not alike:
            whole[name] = "no output layer has its vocabulary, and looking up rows is no work to divide"
            continue
        reason = embedding_reason(embedding)
        if rows < SMALL_VOCABULARY:
            reason = f"its vocabulary of {rows} is small: the sums would cost more than the products"
        for own in (name, *alike):
            if reason:
                whole[own] = reason
            else:
                splits.append(Split(own, Manner.VOCABULARY, rows, "rows", f"vocabulary of {name}"))
    return list({split.name: split for split in splits}.values())


def embedding_reason(embedding: nn.Embedding) -> str:
    """Why an embedding cannot be split; empty if it can."""
    if type(embedding) is not nn.Embedding:
        return "its class has been derived from nn.Embedding, and may compute something else"
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            return f"it has {option}, which looks at all of its rows"
    return ""

"""`nn.MultiheadAttention` split by heads, and torch's transformer layers around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.runtime.tensor_parallel.cuts import Cut
from offbeat.runtime.tensor_parallel.dropout import attention
from offbeat.runtime.tensor_parallel.functions import enter, gather, leave
from offbeat.runtime.tensor_parallel.layers import replace_forward
from offbeat.runtime.tensor_parallel.ways import TensorWays


def attention_cuts(module: Any) -> dict[str, Cut]:
    """How the parameters of an attention module are cut: projections by heads, what follows by its inputs."""
    width = module.embed_dim
    separate = {name: Cut(0, width) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
    fused = Cut(0, 3 * width, 3)
    weights = {"in_proj_weight": fused} if module.in_proj_weight is not None else separate
    biases = {} if module.in_proj_bias is None else {"in_proj_bias": fused}
    return {**weights, **biases, "out_proj.weight": Cut(1, width)}


def why_whole(module: nn.MultiheadAttention) -> str:
    """Why an attention module cannot be split by heads; empty if it can."""
    if type(module) is not nn.MultiheadAttention:
        return "its class has been derived from nn.MultiheadAttention, and may compute something else"
    return "" if module.bias_k is None and not module.add_zero_attn else "it adds keys and values of its own"


def split_attention(module: nn.MultiheadAttention, ways: TensorWays) -> None:
    """Every way computes its share of the heads; their contributions to the output are summed."""
    module.num_heads //= ways.size
    module.__dict__["_offbeat_ways"] = ways
    replace_forward(module, _forward)


def keep_from_shortcuts(model: nn.Module) -> None:
    """Torch's transformer layers compute with the weights of their parts in evaluation, as if they were whole."""
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


def _forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    ways: TensorWays = vars(self)["_offbeat_ways"]
    batched = query.dim() == 3
    if not batched:
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    first = self.batch_first and batched
    q, k, v = (_by_head(each, self.num_heads, batched, first) for each in _projected(self, query, key, value, ways))
    rate = self.dropout if self.training else 0.0
    if is_causal and key_padding_mask is None:
        attn_mask = None  # It says the same, and costs more.
    mask = _mask(attn_mask, key_padding_mask, q, ways)
    weights = None
    if need_weights or rate:
        seen, weights = attention(q, k, v, ways, mask, rate, is_causal and mask is None)
    else:
        seen = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal and mask is None)
    seen = seen.permute(2, 0, 1, 3).flatten(-2)
    output = leave(functional.linear(seen, self.out_proj.weight), ways, self.out_proj.bias)
    if not batched:
        output = output.squeeze(1)
    elif first:
        output = output.transpose(0, 1)  # In memory as torch has it, which is the order of dropout's masks.
    if not need_weights or weights is None:
        return output, None
    if average_attn_weights:
        weights = leave(weights.sum(1) / (self.num_heads * ways.size), ways)
    else:
        weights = gather(weights, Cut(1, self.num_heads * ways.size), ways)
    return output, weights if batched else weights.squeeze(0)


def _projected(self: Any, query: Tensor, key: Tensor, value: Tensor, ways: TensorWays) -> list[Tensor]:
    """Query, key and value of this way's heads, with as few products as the inputs allow."""
    entered = {id(each): enter(each, ways) for each in (query, key, value)}
    q, k, v = (entered[id(each)] for each in (query, key, value))
    bias = self.in_proj_bias
    if self.in_proj_weight is None:
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return [functional.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True)]
    if query is key and key is value:
        return list(functional.linear(q, self.in_proj_weight, bias).chunk(3, -1))
    rows = self.in_proj_weight.shape[0] // 3
    head, tail = self.in_proj_weight.split([rows, 2 * rows])
    bias_head, bias_tail = (None, None) if bias is None else bias.split([rows, 2 * rows])
    first = functional.linear(q, head, bias_head)
    if key is value:
        return [first, *functional.linear(k, tail, bias_tail).chunk(2, -1)]
    biases = (None, None) if bias_tail is None else bias_tail.chunk(2)
    return [first, *(functional.linear(x, w, b) for x, w, b in zip((k, v), tail.chunk(2), biases, strict=True))]


def _by_head(value: Tensor, heads: int, batched: bool, batch_first: bool) -> Tensor:
    """A projection as batch, head, place, feature."""
    if not batched:
        value = value.unsqueeze(1)
    split = value.unflatten(-1, (heads, -1))
    return split.permute(0, 2, 1, 3) if batch_first else split.permute(1, 2, 0, 3)


def _mask(mask: Tensor | None, padding: Tensor | None, query: Tensor, ways: TensorWays) -> Tensor | None:
    """Both masks as one that is added to the scores of this way's heads."""
    added = None
    if mask is not None:
        added = _additive(mask, query)
        if added.dim() == 3:  # One mask for every example and head.
            whole = added.unflatten(0, (query.shape[0], -1))
            added = ways.part(whole, Cut(1, whole.shape[1]))
    if padding is not None:
        column = _additive(padding, query)[:, None, None, :]
        added = column if added is None else added + column
    return added


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(mask, float("-inf"))

"""A transformer block with the usual names, for benchmarks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention with the names of Llama's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        heads = [
            layer(value).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(seen.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.attention(self.norm1(value))
        return value + self.think(self.norm2(value))

"""The layers of the velocity network: attention from the slots to [context; slots], gated MLP, embedding of u and s."""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from flashmap_hf.configuration_flashmap import FlashMapConfig

# Features of u in [0, 1): the scalar, its logits near both ends, and cosines for the middle.
NUM_U_COSINES = 12
U_LOG_FLOOR = 1e-3


Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [B, 1, T, head_dim / 2]


def rotation(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Of the rotary embedding, the same for all layers. positions: `[B, T]` or `[1, T]`, any origin."""
    half = head_dim // 2
    frequencies = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotary position embedding of x `[B, heads, T, head_dim]`."""
    cos, sin = by
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class SlotAttention(nn.Module):
    """Bidirectional over the slots; keys and values are [context; slots]. Query/key RMSNorm, grouped queries, sdpa."""

    def __init__(self, config: FlashMapConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width = config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """x: `[B, T, H]`, by: of its positions -> keys, values `[B, Hkv, T, head_dim]`."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return rotate(keys, by), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,  # [B, K + 1, H]
        by: Rotation,  # of the positions of the slots
        context: tuple[torch.Tensor, torch.Tensor],  # keys, values [B, Hkv, W, head_dim]
        mask: torch.Tensor | None,  # [B, 1, 1, W + K + 1], True = attend
    ) -> torch.Tensor:
        batch, slots, _ = x.shape
        queries = self.q_norm(self.q_proj(x).view(batch, slots, self.heads, self.head_dim)).transpose(1, 2)
        keys, values = self.keys_values(x, by)
        attended = nn.functional.scaled_dot_product_attention(
            rotate(queries, by),
            torch.cat([context[0], keys], dim=2),
            torch.cat([context[1], values], dim=2),
            attn_mask=mask,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.o_proj(attended.transpose(1, 2).reshape(batch, slots, -1))


class SlotLayer(GradientCheckpointingLayer):
    """Pre-norm transformer layer: attention, then a gated MLP."""

    def __init__(self, config: FlashMapConfig):
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.attention_norm = nn.RMSNorm(width, eps=eps)
        self.attention = SlotAttention(config)
        self.mlp_norm = nn.RMSNorm(width, eps=eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        by: Rotation,
        context: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:  # [B, K + 1, H]
        x = x + self.attention(self.attention_norm(x), by, context, mask)
        normed = self.mlp_norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class NoiseEmbedding(nn.Module):
    """Explicit embedding of u (one scalar among D would be ignored) and of the time s."""

    def __init__(self, config: FlashMapConfig):
        super().__init__()
        width = config.hidden_size
        self.u_in = nn.Linear(3 + NUM_U_COSINES, width)
        self.u_out = nn.Linear(width, width, bias=False)
        self.hidden_u = nn.Parameter(torch.zeros(width))
        self.s_in = nn.Linear(1 + NUM_U_COSINES, width)
        self.s_out = nn.Linear(width, width, bias=False)

    @staticmethod
    def cosines(x: torch.Tensor) -> torch.Tensor:  # [...] -> [..., NUM_U_COSINES]
        orders = torch.arange(1, NUM_U_COSINES + 1, device=x.device, dtype=x.dtype)
        return torch.cos(torch.pi * x.unsqueeze(-1) * orders)

    def noise(self, u: torch.Tensor) -> torch.Tensor:  # [B, K] in [0, 1) -> [B, K, H]
        ends = torch.stack([u, torch.log(u + U_LOG_FLOOR), torch.log(1 - u + U_LOG_FLOOR)], dim=-1)
        features = torch.cat([ends, self.cosines(u)], dim=-1).to(self.u_in.weight.dtype)
        return self.u_out(nn.functional.silu(self.u_in(features)))

    def time(self, s: torch.Tensor) -> torch.Tensor:  # [B] in [0, 1) -> [B, 1, H]
        features = torch.cat([s.unsqueeze(-1), self.cosines(s)], dim=-1).to(self.s_in.weight.dtype)
        return self.s_out(nn.functional.silu(self.s_in(features))).unsqueeze(1)

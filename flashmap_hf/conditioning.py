"""Target hidden states -> context: the one tap function, used by training and by generation alike."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def default_tap_layers(num_layers: int, num_taps: int = 4) -> list[int]:
    """Indices into `hidden_states`, evenly spaced, the last one final (index i is the output of the i-th layer)."""
    num_taps = min(num_taps, num_layers)
    return [round(num_layers * (i + 1) / num_taps) for i in range(num_taps)]


def tap(hidden_states: Sequence[Any], tap_layers: Sequence[int]) -> torch.Tensor:
    """Concatenate the tapped layers on the device of the last one.

    Args:
        hidden_states: one `[B, T, D]` per layer (entries that no tap names may be None).
        tap_layers: indices into `hidden_states`; 0 is the embedding, the last index is already normed by the target.

    Returns:
        `[B, T, N * D]`, dtype of the target.
    """
    device = hidden_states[tap_layers[-1]].device
    return torch.cat([hidden_states[i].to(device) for i in tap_layers], dim=-1)


class ContextEncoder(nn.Module):
    """Fuse N tapped hidden states into one context vector: per-tap RMSNorm, concatenate, linear, RMSNorm."""

    def __init__(self, num_taps: int, target_hidden_size: int, hidden_size: int, eps: float):
        super().__init__()
        self.num_taps = num_taps
        self.tap_norms = nn.ModuleList([nn.RMSNorm(target_hidden_size, eps=eps) for _ in range(num_taps)])
        self.fuse = nn.Linear(num_taps * target_hidden_size, hidden_size, bias=False)
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def forward(self, taps: torch.Tensor) -> torch.Tensor:  # [B, T, N * D] -> [B, T, H]
        parts = taps.chunk(self.num_taps, dim=-1)
        normed = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=-1)
        return self.norm(self.fuse(normed))


class ContextWindow:
    """The last W committed positions of one sequence: a rolling buffer of taps, the drafter's only state."""

    def __init__(self, window: int):
        self.window = window
        self.taps: torch.Tensor | None = None  # [B, <= W, N * D]

    def append(self, taps: torch.Tensor) -> None:  # [B, T, N * D], newly committed positions, oldest first
        taps = taps[:, -self.window :]
        kept = self.window - taps.shape[1]
        if self.taps is not None and kept > 0:
            taps = torch.cat([self.taps[:, -kept:], taps], dim=1)
        # a slice would keep the whole prefill's hidden states alive
        self.taps = taps.clone() if taps._base is not None else taps


def stacked(contexts: Sequence[ContextWindow]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Taps `[B, W, N * D]` of several sequences, newest last; mask `[B, W]`, False where one has seen fewer positions.

    No mask where all have seen equally many.
    """
    taps = [context.taps for context in contexts if context.taps is not None]
    longest = max(t.shape[1] for t in taps)
    if all(t.shape[1] == longest for t in taps):
        return taps[0] if len(taps) == 1 else torch.cat(taps), None
    mask = torch.stack([torch.arange(longest, device=t.device) >= longest - t.shape[1] for t in taps])
    padded = [torch.nn.functional.pad(t, (0, 0, longest - t.shape[1], 0)) for t in taps]
    return torch.cat(padded), mask

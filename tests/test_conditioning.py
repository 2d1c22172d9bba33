"""Taps, fusion and the rolling window of committed positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashmap_hf.conditioning import ContextEncoder, ContextWindow, default_tap_layers, tap


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 30, 61])
def test_default_taps_are_increasing_and_end_with_the_final_state(layers: int) -> None:
    taps = default_tap_layers(layers)
    assert taps == sorted(set(taps)) and taps[-1] == layers and taps[0] >= 1 and len(taps) == min(4, layers)


def test_tap_concatenates_the_named_layers_only() -> None:
    states = [torch.full((1, 2, 3), float(i)) for i in range(5)]
    states[2] = None  # type: ignore[call-overload]  # transformers leaves out what was not asked for
    assert torch.equal(tap(states, [1, 4]), torch.cat([states[1], states[4]], dim=-1))


def test_encoder_ignores_the_scale_of_each_tap() -> None:
    torch.manual_seed(0)
    encoder = ContextEncoder(2, 16, 8, 0.0)
    taps = torch.randn(1, 3, 32)
    scaled = torch.cat([taps[..., :16] * 1000, taps[..., 16:] * 0.01], dim=-1)
    torch.testing.assert_close(encoder(taps), encoder(scaled), rtol=1e-4, atol=1e-5)


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_window_keeps_the_newest_positions(window: int, sizes: list[int]) -> None:
    context = ContextWindow(window)
    position = 0
    for size in sizes:
        whole = torch.arange(position, position + size + 2.0).view(1, -1, 1)
        context.append(whole[:, :size])  # a slice of a longer forward, as in decoding
        position += size
        assert context.taps is not None
        assert context.taps.flatten().tolist() == list(range(max(0, position - window), position))
        assert context.taps._base is None

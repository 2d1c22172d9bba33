"""Readout: shared rows, draft vocabulary, low rank, transition; rows of a module that cannot be read."""

import pytest
import torch
from torch import nn

from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.head import DraftHead, unembedding_rows


def config(**overrides: object) -> FlashMapConfig:
    fields: dict[str, object] = {"target_hidden_size": 8, "target_num_layers": 2, "vocab_size": 20}
    return FlashMapConfig(**(fields | overrides))  # type: ignore[arg-type]


class Opaque(nn.Module):
    """A map whose weight cannot be indexed: packed as integers, like a quantised layer."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter((weight * 100).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() / 100).t()


def test_shared_head_is_the_targets_unembedding() -> None:
    torch.manual_seed(0)
    rows = torch.randn(20, 8)
    z = torch.randn(2, 3, 8)
    head = DraftHead(config())
    torch.testing.assert_close(head(z, rows), z @ rows.t())
    assert not [n for n, _ in head.named_parameters() if n != "readout_scale"]
    assert torch.equal(head.target_ids(torch.tensor([3, 7])), torch.tensor([3, 7]))


def test_draft_vocabulary_maps_back_to_target_ids_and_is_saved() -> None:
    head = DraftHead(config(draft_vocab_size=4))
    head.draft_vocab_ids.copy_(torch.tensor([2, 5, 11, 19]))
    assert "draft_vocab_ids" in head.state_dict()
    z, weight = torch.randn(1, 2, 8), torch.randn(20, 8)
    logits = head(z, weight[head.ids])
    torch.testing.assert_close(logits, (z @ weight.t())[..., [2, 5, 11, 19]])
    assert head.target_ids(logits.argmax(-1)).tolist() == [[[2, 5, 11, 19][i] for i in logits[0].argmax(-1).tolist()]]


def test_low_rank_head_needs_no_target() -> None:
    head = DraftHead(config(head="low_rank", head_rank=3))
    assert head(torch.randn(1, 2, 8), None).shape == (1, 2, 20)
    assert head.up.weight.shape == (20, 3) and head.down.weight.shape == (3, 8)


def test_ids_beyond_the_tokenizer_are_never_proposed() -> None:
    assert DraftHead(config(tokenizer_size=17)).ids.tolist() == list(range(17))


# --- the transition -------------------------------------------------------------------------------------------------


def head_with_transition(**overrides: object) -> DraftHead:
    """Its weights are random, the zero of an untrained B included."""
    torch.manual_seed(0)
    head = DraftHead(config(transition_rank=3, **overrides))
    assert head.transition is not None
    torch.nn.init.normal_(head.transition.readout.weight)
    return head


def test_biased_blocks_equal_the_walk() -> None:
    head = head_with_transition()
    logits, z_1, tokens = torch.randn(2, 4, 20), torch.randn(2, 4, 8), torch.randint(21, (2, 4))
    blocks = head.biased(logits, z_1, tokens)
    assert blocks.shape == logits.shape and not torch.allclose(blocks, logits)
    for b in range(2):
        for k in range(4):
            row = head.biased(logits[b, k], z_1[b, k], tokens[b, k])
            torch.testing.assert_close(row, blocks[b, k])


def test_the_bias_is_what_the_formula_says() -> None:
    head = head_with_transition()
    a, b, c = (head.get_parameter(f"transition.{n}.weight") for n in ("previous", "readout", "endpoint"))
    z_1 = torch.randn(8)
    expected = b @ torch.nn.functional.silu(a[7] + c @ z_1)
    torch.testing.assert_close(head.biased(torch.zeros(20), z_1, torch.tensor(7)), expected)


def test_an_untrained_transition_changes_nothing_and_learns_at_once() -> None:
    head = DraftHead(config(transition_rank=3))
    logits, z_1 = torch.randn(2, 4, 20), torch.randn(2, 4, 8)
    biased = head.biased(logits, z_1, torch.randint(21, (2, 4)))
    assert torch.equal(biased, logits)
    biased.logsumexp(-1).sum().backward()
    assert head.get_parameter("transition.readout.weight").grad.abs().min() > 0  # type: ignore[union-attr]


def test_without_a_transition_nothing_is_stored_and_nothing_is_done() -> None:
    head = DraftHead(config())
    logits = torch.randn(2, 20)
    assert head.biased(logits, torch.randn(2, 8), torch.tensor([1, 2])) is logits
    assert not [n for n in head.state_dict() if "transition" in n]


@pytest.mark.parametrize("overrides", [{}, {"tokenizer_size": 17}, {"draft_vocab_size": 4}])
def test_draft_positions_undo_target_ids(overrides: dict[str, object]) -> None:
    head = head_with_transition(**overrides)
    if head.restricted:
        head.draft_vocab_ids.copy_(torch.tensor([11, 2, 19, 5]))
    inside = torch.arange(head.size)
    assert torch.equal(head.draft_positions(head.target_ids(inside)), inside)
    outside = sorted(set(range(20)) - set(head.ids.tolist()))
    assert head.draft_positions(torch.tensor([outside, outside])).tolist() == [[head.size] * len(outside)] * 2
    assert head.draft_positions(torch.tensor(int(head.ids[0]))).item() == 0
    # a token outside has its own row, the last
    assert head.transition is not None and head.transition.previous.weight.shape == (head.size + 1, 3)


# --- rows of the target ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [7, torch.tensor([0, 3, 9])])
def test_rows_by_weight_equal_rows_by_calling(ids: int | torch.Tensor) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(10, 70) * 100).round().clamp(-120, 120) / 100
    linear = nn.Linear(70, 10, bias=False)
    linear.weight.data.copy_(weight)
    expected = weight[:ids] if isinstance(ids, int) else weight[ids]
    assert torch.equal(unembedding_rows(linear, ids, 70), expected)
    torch.testing.assert_close(unembedding_rows(Opaque(weight), ids, 70), expected)


def test_rows_of_an_unembedding_without_parameters() -> None:
    """Packed int8 weights are no parameters: the module is called."""

    class Packed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.arange(12.0).view(4, 3).t()

    assert torch.equal(unembedding_rows(Packed(), 2, 3), torch.arange(6.0).view(2, 3))

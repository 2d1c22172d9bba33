"""Readout: the shared rows, the draft vocabulary, the low rank; rows of a module that cannot be read."""

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

"""What to verify next: how much is decided before a token of it is drawn, and stays within what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table_model import K, V, table_pair
from transformers import LogitsProcessorList

from flashmap_hf.candidates import FlashMapCandidateGenerator
from flashmap_hf.costs import StepCost
from flashmap_hf.generation_config import DraftOptions
from flashmap_hf.modeling_flashmap import FlashMapOutput
from flashmap_hf.pace import Pace
from flashmap_hf.proposals import Proposals, plan


def sampled_proposals(trees: bool, pace: Pace | None = None, **options: Any) -> tuple[Proposals, Any, torch.Tensor]:
    """A drafter with a transition (what it claims behind a token depends on the token), and n-grams that match."""
    target, drafter = table_pair(transition_rank=4)
    target.generation_config.do_sample, target.generation_config.max_length = True, 100
    settings = DraftOptions(K, 0.0, "rejection", 1, draft_ngrams=True, **options)
    generator = FlashMapCandidateGenerator(drafter, target, target.generation_config, LogitsProcessorList(), settings)
    text = torch.tensor([[1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 2, 2, 1, 2, 3]])
    proposals = Proposals(generator, pace, trees)
    proposals.see(text[0].tolist())
    generator.context.append(torch.eye(V)[text[:, -3:-1]])
    # unlike a table, flat at first and sure behind: joint claims of a draft lie on both sides of the n-grams'
    logits = torch.tensor([[1.0, 1.2, 0.9, 1.1, 1.0], [0.0, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0, 0.0]])
    return proposals, FlashMapOutput(logits=logits[None], z_1=logits[None]), text


def test_whether_a_draft_or_an_ngram_is_offered_does_not_depend_on_the_tokens_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where only a chain can be verified one of the two is dropped; a draft that is dropped for what it drew would
    condition its tokens on having been kept."""
    monkeypatch.setattr("flashmap_hf.proposals.NGRAM_TRUST", {3: (0.33, 0.33), 2: (0.33, 0.33)})
    used, claims = set(), set()
    for _ in range(100):
        proposals, output, text = sampled_proposals(trees=False)
        proposals.look_up(text)
        drawn = proposals.candidates.read(text, output, K)
        claims.add(sum(drawn.tree.joint) >= sum(proposals.branches[0][1]))
        plan([proposals], [text], [output])
        draft = proposals.propose(text, output)
        used.add(len(draft.tree) == K)
    assert claims == {True, False}  # the tokens drawn would have decided
    assert len(used) == 1


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("trees", [True, False])
def test_sampled_drafts_and_ngrams_together_stay_within_the_stake(trees: bool, drafts: int) -> None:
    cost = StepCost({n: 1.0 + 0.02 * (n - 1) for n in (1, 2, 3, 5, 9, 17)}, 0.01)
    for tokens in (64, 128, 512, 2048):
        pace = Pace(cost)
        pace.tokens, pace.time = tokens, tokens * 1.0 + 0.03 * tokens - 0.1
        proposals, output, text = sampled_proposals(trees, pace, adaptive=True, num_drafts=drafts)
        proposals.look_up(text)
        proposals.drafted = True
        plan([proposals], [text], [output])
        draft = proposals.propose(text, output)
        assert cost.price(1, len(draft.tree)) + cost.draft_price <= pace.stake + 1e-9
        assert len(draft.tree) > 0


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_size_of_a_tree_holds_for_sampled_drafts_too(size: int) -> None:
    proposals, output, text = sampled_proposals(True, tree_size=size, num_drafts=3)
    proposals.look_up(text)
    plan([proposals], [text], [output])
    assert 1 <= len(proposals.propose(text, output).tree) <= size

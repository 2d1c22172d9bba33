"""FlashMapCandidateGenerator: what it proposes, how long its blocks are, and the door for transformers' own loop."""

import inspect
from typing import Any

import pytest
import torch
from oracle import (
    BLOCK,
    PLAIN,
    PROMPT,
    VOCABULARY,
    Oracle,
    complaints,
    make,
    make_oracle,
    run,
    scene,
    taught,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import SuppressTokensLogitsProcessor

from flashmap_hf import FlashMapCandidateGenerator, FlashMapDrafter
from flashmap_hf.generation_config import DraftOptions

START = PROMPT.shape[1]
PADDED = len(VOCABULARY) + 11


def generator(
    target: Any, drafter: Any, processors: Any = (), do_sample: bool = False, max_length: int = 64, **options: Any
) -> FlashMapCandidateGenerator:
    defaults: dict[str, Any] = {
        "num_assistant_tokens": BLOCK,
        "assistant_confidence_threshold": 0.0,
        "verification": "auto",
        "num_steps": 1,
    }
    config = GenerationConfig(do_sample=do_sample, max_length=max_length)
    return FlashMapCandidateGenerator(
        drafter, target, config, LogitsProcessorList(processors), DraftOptions(**(defaults | options))
    )


def shown(candidates: FlashMapCandidateGenerator, target: Any, text: torch.Tensor) -> None:
    """Let it see the states of all but the newest token."""
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    candidates.observe(states, 0, text.shape[1] - 1)


# --- the vocabulary -------------------------------------------------------------------------------------------------


class WantsPadding(Oracle):
    """Would love the ids beyond the tokenizer, if its head had them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., len(VOCABULARY) :] = 100.0
        return output


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("overrides", [{}, {"head": "low_rank", "head_rank": 4}, {"coupling": "independent"}], ids=str)
def test_ids_that_the_tokenizer_lacks_are_never_proposed(overrides, settings, monkeypatch):
    target = tiny_target(31, vocab_size=PADDED)
    with torch.no_grad():  # what a padded target looks like to a drafter: the rows are there, and attractive
        target.lm_head.weight[len(VOCABULARY) :] *= 50
    tokenizer = tiny_tokenizer()
    drafter = make(FlashMapDrafter, target, tokenizer=tokenizer, **overrides)
    assert drafter.config.tokenizer_size == len(VOCABULARY) < drafter.config.vocab_size == PADDED
    proposed: list[int] = []
    read = FlashMapCandidateGenerator.read

    def spied(self: FlashMapCandidateGenerator, *args: Any) -> Any:
        found = read(self, *args)
        proposed.extend(found.tokens.tolist())
        return found

    monkeypatch.setattr(FlashMapCandidateGenerator, "read", spied)
    plain = target.generate(PROMPT, **(PLAIN | {"max_new_tokens": 12}))
    found, _ = run(target, drafter, max_new_tokens=12, **settings)
    assert len(proposed) > 0
    assert max(proposed) < len(VOCABULARY)
    if not settings:
        assert found.tolist() == plain.tolist()


def test_without_a_tokenizer_the_whole_vocabulary_is_open():
    target = tiny_target(31, vocab_size=PADDED)
    drafter = tiny_drafter(target)
    assert drafter.head.size == PADDED


def test_an_oracle_of_a_padded_target_has_a_short_head():
    target = tiny_target(31, vocab_size=PADDED)
    text = target.generate(PROMPT, **PLAIN, max_new_tokens=12, suppress_tokens=list(range(len(VOCABULARY), PADDED)))
    oracle = make(WantsPadding, target, tokenizer=tiny_tokenizer())
    oracle.teach(target, text)
    found, stats = run(target, oracle, max_new_tokens=12, suppress_tokens=list(range(len(VOCABULARY), PADDED)))
    assert found.tolist() == text.tolist()
    assert stats.accepted > 0


def test_a_draft_vocabulary_proposes_its_own_ids():
    target, text = scene()
    drafter = tiny_drafter(target, draft_vocab_size=7)
    chosen = torch.tensor([90, 3, 60, 14, 59, 26, 81])
    drafter.head.draft_vocab_ids.copy_(chosen)
    for processors in ((), (SuppressTokensLogitsProcessor([90]),)):
        candidates = generator(target, drafter, processors)
        shown(candidates, target, text[:, :20])
        found = candidates.draft(text[:, :20]).tokens
        assert len(found) == BLOCK
        assert set(found.tolist()) <= set(chosen.tolist())


# --- how long a block is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", range(BLOCK + 3))
def test_a_block_leaves_room_for_the_targets_own_token(room):
    target, text = scene()
    candidates = generator(target, taught(target, text), max_length=20 + room)
    shown(candidates, target, text[:, :20])
    assert len(candidates.draft(text[:, :20]).tokens) == min(max(room - 1, 0), BLOCK)


@pytest.mark.parametrize("tokens", range(1, BLOCK + 1))
def test_num_assistant_tokens(tokens):
    target, text = scene()
    candidates = generator(target, taught(target, text), num_assistant_tokens=tokens)
    shown(candidates, target, text[:, :20])
    assert candidates.draft(text[:, :20]).tokens.tolist() == text[0, 20 : 20 + tokens].tolist()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.4, 0.6, 0.69, 0.71, 1.0])
def test_the_threshold_is_on_the_product(threshold, do_sample):
    target, text = scene()
    oracle = make_oracle(target, coupling="independent")
    oracle.teach(target, text)
    oracle.confidence = float(torch.tensor(0.7 * (len(VOCABULARY) - 1) / 0.3).log())  # a probability of 0.7
    candidates = generator(target, oracle, do_sample=do_sample, assistant_confidence_threshold=threshold)
    shown(candidates, target, text[:, :20])
    expected = sum(0.7**k >= threshold for k in range(1, BLOCK + 1))
    assert len(candidates.draft(text[:, :20]).tokens) == expected


def test_nothing_is_drafted_before_anything_is_seen():
    target, text = scene()
    candidates = generator(target, make_oracle(target))
    assert len(candidates.draft(text[:, :20]).tokens) == 0


# --- q --------------------------------------------------------------------------------------------------------------


def test_q_is_the_law_after_the_processors():
    target, text = scene()
    drafter = tiny_drafter(target, coupling="independent")
    processors = [TemperatureLogitsWarper(0.5), SuppressTokensLogitsProcessor([2, 5])]
    candidates = generator(target, drafter, processors, do_sample=True)
    shown(candidates, target, text[:, :20])
    draft = candidates.draft(text[:, :20])
    assert draft.probs is not None
    assert draft.probs.shape == (BLOCK, len(VOCABULARY))
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(BLOCK))
    assert draft.probs[:, [2, 5]].abs().max() == 0
    assert (draft.probs.gather(1, draft.tokens[:, None]) > 0).all()


def test_drafting_leaves_the_global_generator_alone_when_greedy():
    target, _ = scene()
    for coupling in ("quantile", "independent"):
        state = torch.get_rng_state()
        run(target, tiny_drafter(target, coupling=coupling), max_new_tokens=8)
        assert torch.equal(torch.get_rng_state(), state)


def test_not_finite_logits_warn_once_and_draft_nothing():
    target, text = scene()
    drafter = tiny_drafter(target)
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    candidates = generator(target, drafter)
    shown(candidates, target, text[:, :20])
    with complaints() as said:
        lengths = [len(candidates.draft(text[:, :20]).tokens) for _ in range(3)]
    assert lengths == [0, 0, 0]
    assert len(said) == 1
    assert candidates.working is False


# --- the transition -------------------------------------------------------------------------------------------------


def with_transition(target: Any, **overrides: Any) -> Any:
    """An untrained drafter but for its transition, which is random and strong."""
    drafter = tiny_drafter(target, transition_rank=6, **overrides)
    torch.nn.init.normal_(drafter.head.transition.readout.weight, generator=torch.Generator().manual_seed(5))
    return drafter


def teacher_forced(candidates: FlashMapCandidateGenerator, text: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Biased logits `[K, N]` of the block after `text`, each row given the token of `tokens` before it."""
    head = candidates.drafter.head
    output = candidates._forward(text[:, -1], None)
    previous = head.draft_positions(torch.cat([text[0, -1:], tokens[:-1]]))
    return head.biased(output.logits[0], output.z_1[0], previous)


@pytest.mark.parametrize("draft_vocabulary", [None, 40])  # smaller: the anchor is outside of it
@pytest.mark.parametrize("processors", [(), (SuppressTokensLogitsProcessor([3, 9, 21, 50, 77]),)], ids=len)
def test_the_argmax_walk_is_the_biased_block(draft_vocabulary, processors):
    target, text = scene()
    drafter = with_transition(target, draft_vocab_size=draft_vocabulary)
    if draft_vocabulary is not None:
        drafter.head.draft_vocab_ids.copy_(torch.tensor([i for i in range(155) if i != text[0, 19]][::3][:40]))
    candidates = generator(target, drafter, processors)
    candidates.rule = "one_hot"  # reads argmaxes and hides the noise, as `teacher_forced` does
    shown(candidates, target, text[:, :20])
    tokens = candidates.draft(text[:, :20]).tokens
    assert len(tokens) == BLOCK
    scores = torch.full((BLOCK, len(VOCABULARY)), -torch.inf)
    scores[:, drafter.head.ids] = teacher_forced(candidates, text[:, :20], tokens).detach()
    for processor in processors:
        scores = processor(text[:, :20], scores)
    assert tokens.tolist() == scores.argmax(-1).tolist()
    marginal = candidates._forward(text[:, 19], None).logits[0]
    assert drafter.head.target_ids(marginal.argmax(-1)).tolist() != tokens.tolist()


def test_q_is_the_biased_law_on_the_path_drawn():
    target, text = scene()
    drafter = with_transition(target)
    processors = [TemperatureLogitsWarper(0.5), SuppressTokensLogitsProcessor([2, 5])]
    candidates = generator(target, drafter, processors, do_sample=True, verification="rejection")
    shown(candidates, target, text[:, :20])
    draft = candidates.draft(text[:, :20])
    scores = teacher_forced(candidates, text[:, :20], draft.tokens).detach() / 0.5
    scores[:, [2, 5]] = -torch.inf
    torch.testing.assert_close(draft.probs, scores.softmax(-1))


def follower(target: Any, order: list[int], probability: float, **overrides: Any) -> Any:
    """Marginally it knows nothing; its transition makes the token that follows in `order` likely after each token."""
    size = len(VOCABULARY)
    oracle = make_oracle(target, transition_rank=size, **overrides)
    oracle.confidence = 0.0
    forward = oracle.forward

    def with_endpoints(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.z_1 = torch.zeros(1, BLOCK, oracle.config.target_hidden_size)
        return output

    oracle.forward = with_endpoints
    oracle.teach(target, torch.tensor([order]))
    bias = torch.tensor(probability * (size - 1) / (1 - probability)).log()
    with torch.no_grad():
        transition = oracle.head.transition
        transition.previous.weight.copy_(20.0 * torch.eye(size + 1, size))  # silu(20) is 20
        transition.readout.weight.zero_()
        transition.readout.weight[torch.tensor(order[1:]), torch.tensor(order[:-1])] = bias / 20.0
    return oracle


def test_the_walk_follows_the_tokens_it_drafted():
    """Blocks that stand whole, though every slot's own logits are flat; greedy text is the target's."""
    target, text = scene()
    oracle = follower(target, text[0, START : START + 12].tolist(), 0.99)
    found, stats = run(target, oracle, max_new_tokens=12)
    assert found.tolist() == text[:, : START + 12].tolist()
    assert stats.target_steps == 1 + -(-11 // (BLOCK + 1))


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_a_transition_leaves_greedy_text_as_it_is(settings):
    target, _ = scene()
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=24, **settings)
    found, stats = run(target, with_transition(target), max_new_tokens=24, **settings)
    assert found.tolist() == plain.tolist()
    assert stats.blocks > 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.6, 0.71])
def test_the_threshold_is_on_the_biased_law(threshold, do_sample):
    target, text = scene()
    ring = list(range(len(VOCABULARY)))
    oracle = follower(target, [*ring, 0], 0.7, coupling="independent")  # 0.7 after every token, drawn or not
    candidates = generator(target, oracle, do_sample=do_sample, assistant_confidence_threshold=threshold)
    shown(candidates, target, text[:, :20])
    expected = sum(0.7**k >= threshold for k in range(1, BLOCK + 1))
    assert len(candidates.draft(text[:, :20]).tokens) == expected


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}, {"do_sample": True}], ids=str)
def test_a_transition_that_is_not_finite_warns_once(settings):
    target, _ = scene()
    drafter = with_transition(target, coupling="independent")
    with torch.no_grad():
        drafter.head.transition.readout.weight.fill_(float("nan"))
    with complaints() as said:
        found, stats = run(target, drafter, max_new_tokens=8, **settings)
    assert len([line for line in said if "not finite" in line]) == 1
    assert stats.blocks == 1 and stats.drafted == 0 and stats.plain_calls == 1
    assert found.shape[1] == START + 8


# --- the stock loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_contract_of_get_candidates(do_sample):
    target, text = scene()
    oracle = taught(target, text)
    candidates = generator(target, oracle, do_sample=do_sample, verification="one_hot")
    first, logits = candidates.get_candidates(PROMPT, is_first_iteration=True)
    assert first.tolist() == PROMPT.tolist()
    assert logits is None
    with torch.no_grad():
        outputs = target(PROMPT, output_hidden_states=True)
    prefix = text[:, : START + 1]
    found, logits = candidates.get_candidates(prefix, {}, outputs, False, 0)
    assert found.tolist() == text[:, : START + 1 + BLOCK].tolist()
    if do_sample:
        assert logits.shape == (1, BLOCK, len(VOCABULARY))
        assert logits.argmax(-1)[0].tolist() == found[0, START + 1 :].tolist()
        assert logits.softmax(-1).amax(-1).tolist() == [[1.0] * BLOCK]
    else:
        assert logits is None
    candidates.update_candidate_strategy(found, None, BLOCK)


def test_transformers_own_loop_runs_on_it():
    """The loop of transformers itself, unwrapped, with our generator: greedy text is the target's."""
    target, text = scene()
    oracle = taught(target, text)
    stock = inspect.unwrap(GenerationMixin._assisted_decoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_assisted_decoding", stock)
        found = target.generate(PROMPT, assistant_model=oracle, **PLAIN, max_new_tokens=12)
    assert found.tolist() == text[:, : START + 12].tolist()
    assert 0 < oracle.passes < 8


def test_neither_model_nor_processors_are_kept_or_changed():
    target, _ = scene()
    drafter = tiny_drafter(target)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    modules = len(list(drafter.modules())), len(list(target.modules()))
    candidates = generator(target, drafter, processors)
    assert len(processors) == 1
    assert (len(list(drafter.modules())), len(list(target.modules()))) == modules
    assert not any(value is target for value in vars(drafter).values())
    assert candidates.requires_model_outputs

"""Targets and drafters that peft has adapted: the adapter acts as in plain decoding, and the drafter still helps."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import difference, oracle_for, random_prompt, tiny_drafter, tiny_target
from transformers import DynamicCache

import flashmap_hf
from flashmap_hf import FlashMapDrafter
from flashmap_hf.head import readable_weight, unembedding_rows
from flashmap_hf.training.lora import add_adapter, save_adapter

NEW_TOKENS = 20
PROMPT = random_prompt(7, 64, seed=3)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
ATTENTION = ["q_proj", "v_proj", "down_proj"]
LORA_TARGETS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": ATTENTION},
    "dora": {"target_modules": ATTENTION, "use_dora": True},
    "embedding and head": {"target_modules": [*ATTENTION, "embed_tokens", "lm_head"]},
    "whole head and embedding": {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]},
    "new tokens": {"target_modules": ATTENTION, "trainable_token_indices": {"embed_tokens": [3, 5]}},
}
VIRTUAL = 5
PROMPT_LEARNING: dict[str, peft.PeftConfig] = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, encoder_hidden_size=16),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
}


def adapted(config: peft.PeftConfig, seed: int = 4) -> Any:
    """A tiny target under an adapter that says something else than the bare target."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(tiny_target(), copy.deepcopy(config)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def oracle_of(target: Any, text: torch.Tensor, **overrides: Any) -> Any:
    oracle = oracle_for(target.get_base_model(), block_size=4, window=4, **overrides)
    oracle.teach(target, text)
    return oracle


# --- low-rank adapters on the target --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LORA_TARGETS)
def test_a_lora_target_says_the_same_with_a_drafter(name: str) -> None:
    bare = tiny_target().generate(**PROMPT, **GREEDY)
    target = adapted(peft.LoraConfig(r=4, task_type="CAUSAL_LM", **LORA_TARGETS[name]))
    plain = target.generate(**PROMPT, **GREEDY)
    assert plain.tolist() != bare.tolist()
    with flashmap_hf.record() as stats:
        ours = target.generate(**PROMPT, **GREEDY, assistant_model=oracle_of(target, plain))
    assert ours.tolist() == plain.tolist(), difference(target, plain, ours)
    assert stats.accepted > 0 and stats.plain_calls == 0
    untrained = tiny_drafter(target.get_base_model())
    assert target.generate(**PROMPT, **GREEDY, assistant_model=untrained).tolist() == plain.tolist()


def test_adapters_are_switched_between_calls() -> None:
    target = adapted(peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=ATTENTION))
    target.add_adapter("second", peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["o_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if ".second." in name:
                parameter.normal_(std=0.5)
    drafter = tiny_drafter(target.get_base_model())
    texts = []
    for adapter in ("default", "second"):
        target.set_adapter(adapter)
        plain = target.generate(**PROMPT, **GREEDY)
        assert target.generate(**PROMPT, **GREEDY, assistant_model=drafter).tolist() == plain.tolist()
        texts.append(plain.tolist())
    with target.disable_adapter():
        plain = target.generate(**PROMPT, **GREEDY)
        assert target.generate(**PROMPT, **GREEDY, assistant_model=drafter).tolist() == plain.tolist()
        texts.append(plain.tolist())
    assert texts[0] != texts[1] and texts[1] != texts[2] and texts[0] != texts[2]


def test_sampling_from_a_lora_target_keeps_the_seed() -> None:
    """The shared noise is the only randomness: an oracle that is refused anywhere does not change the text."""
    target = adapted(peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=ATTENTION))
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS}
    texts = []
    for seed in (0, 1):
        torch.manual_seed(5)
        drafter = tiny_drafter(target.get_base_model(), seed=seed)
        texts.append(target.generate(**PROMPT, **sampling, assistant_model=drafter).tolist())
    assert texts[0] == texts[1]


def test_the_rows_of_an_adapted_unembedding_are_those_that_it_applies() -> None:
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    target = peft.get_peft_model(tiny_target(), config).eval()
    head = target.get_base_model().get_output_embeddings()
    base = head.get_base_layer().weight
    rows = unembedding_rows(head, 64, 32)
    delta = head.get_delta_weight("default")
    assert delta.abs().max() > 0.01
    # one unit vector at a time picks exact products; only the sum of base and delta is rounded
    torch.testing.assert_close(rows, base + delta)
    with target.disable_adapter():
        assert torch.equal(unembedding_rows(head, 64, 32), base)
        assert readable_weight(head, 32) is not None  # no reason to call it


def test_a_replaced_unembedding_is_read_and_not_called() -> None:
    target = adapted(peft.LoraConfig(r=4, **LORA_TARGETS["whole head and embedding"]))
    head = target.get_base_model().get_output_embeddings()
    trained = head.modules_to_save["default"].weight
    assert not torch.equal(trained, head.original_module.weight)
    weight = readable_weight(head, 32)
    assert weight is not None and weight.data_ptr() == trained.data_ptr()


# --- virtual tokens -------------------------------------------------------------------------------------------------


def virtual_tokens(tuned: Any) -> DynamicCache:
    """The cache that the adapter's virtual tokens leave behind; `examples/peft_target.py` shows the same."""
    with torch.no_grad():
        learned = tuned.get_prompt(batch_size=1)
        if isinstance(learned, DynamicCache):  # prefix tuning learns keys and values
            return learned
        cache = DynamicCache(config=tuned.get_base_model().config)
        tuned.get_base_model()(inputs_embeds=learned, cache=cache, use_cache=True)
        return cache


@torch.no_grad()
def greedy_by_hand(tuned: Any, cache: DynamicCache) -> torch.Tensor:
    """Argmax after argmax through the base model over the adapter's own cache, one token at a time."""
    ids, fresh = PROMPT["input_ids"], PROMPT["input_ids"]
    for _ in range(NEW_TOKENS):
        logits = tuned.get_base_model()(input_ids=fresh, cache=cache, use_cache=True).logits
        fresh = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, fresh], dim=1)
    return ids


@pytest.mark.parametrize("name", PROMPT_LEARNING)
def test_a_target_behind_virtual_tokens(name: str) -> None:
    """The adapter's cache is a first turn: `generate` continues it, with and without a drafter."""
    tuned = adapted(PROMPT_LEARNING[name])
    base = tuned.get_base_model()
    bare = base.generate(**PROMPT, **GREEDY)
    expected = greedy_by_hand(tuned, virtual_tokens(tuned))
    mask = torch.ones(1, VIRTUAL + PROMPT["input_ids"].shape[1], dtype=torch.long)
    call = {"input_ids": PROMPT["input_ids"], "attention_mask": mask, **GREEDY}
    plain = base.generate(**call, cache=virtual_tokens(tuned))
    assert plain.tolist() == expected.tolist() and plain.tolist() != bare.tolist()
    oracle = oracle_for(base, block_size=4, window=4)
    states = base(plain, cache=virtual_tokens(tuned), output_hidden_states=True).hidden_states[-1][0]
    oracle.states, oracle.text = states.detach(), plain[0]
    with flashmap_hf.record() as stats:
        ours = base.generate(**call, cache=virtual_tokens(tuned), assistant_model=oracle)
    assert ours.tolist() == plain.tolist()
    assert stats.accepted > 0


@pytest.mark.parametrize("name", PROMPT_LEARNING)
def test_peft_generate_behind_virtual_tokens_decodes_plainly(name: str) -> None:
    """Blocks would see other virtual tokens than single steps do: the drafter is left out, and a warning says so."""
    tuned = adapted(PROMPT_LEARNING[name])
    plain = tuned.generate(**PROMPT, **GREEDY)
    oracle = oracle_for(tuned.get_base_model(), block_size=4, window=4)
    oracle.teach(tuned.get_base_model(), plain)
    with flashmap_hf.record() as stats, pytest.warns(UserWarning, match="virtual tokens one step at a time"):
        found = tuned.generate(**PROMPT, **GREEDY, assistant_model=oracle)
    assert found.tolist() == plain.tolist()
    assert stats.plain_calls == 1


# --- adapters on the drafter ----------------------------------------------------------------------------------------


def test_a_drafter_adapter_is_saved_loaded_merged_and_used(tmp_path: Path) -> None:
    target = tiny_target()
    plain = target.generate(**PROMPT, **GREEDY)
    tiny_drafter(target, head="low_rank", head_rank=8).save_pretrained(tmp_path / "drafter")

    def base() -> FlashMapDrafter:
        return FlashMapDrafter.from_pretrained(tmp_path / "drafter")

    trained = add_adapter(base(), rank=4)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    save_adapter(trained, tmp_path / "adapter", base=str(tmp_path / "drafter"))
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    merged = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").merge_and_unload()
    assert isinstance(merged, FlashMapDrafter)
    merged.save_pretrained(tmp_path / "merged")
    again = FlashMapDrafter.from_pretrained(tmp_path / "merged")

    def drafts(assistant: Any) -> tuple[list[int], torch.Tensor]:
        """The text, and the first block's logits as `generate` had them made."""
        drafter = assistant if isinstance(assistant, FlashMapDrafter) else assistant.get_base_model()
        seen: list[torch.Tensor] = []
        handle = drafter.register_forward_hook(lambda module, args, output: seen.append(output.logits))
        with flashmap_hf.record() as stats:
            text = target.generate(**PROMPT, **GREEDY, assistant_model=assistant)
        handle.remove()
        assert stats.drafted > 0 and stats.plain_calls == 0
        return text[0].tolist(), seen[0]

    expected_text, expected_logits = drafts(trained.eval())
    assert expected_text == plain[0].tolist()
    for assistant in (loaded, merged, again):
        text, logits = drafts(assistant)
        assert text == expected_text
        torch.testing.assert_close(logits, expected_logits)
    _, bare_logits = drafts(base())
    assert (bare_logits - expected_logits).abs().max() > 0.01


def test_adapters_on_both_sides() -> None:
    target = adapted(peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=ATTENTION))
    plain = target.generate(**PROMPT, **GREEDY)
    drafter = add_adapter(tiny_drafter(target.get_base_model()), rank=2).eval()
    with flashmap_hf.record() as stats:
        ours = target.generate(**PROMPT, **GREEDY, assistant_model=drafter)
    assert ours.tolist() == plain.tolist()
    assert stats.drafted > 0

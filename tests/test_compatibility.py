"""What block drafting does not support is refused before any work, in one sentence that names it and the way out."""

import re
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from oracle import (
    PLAIN,
    PROMPT,
    VOCABULARY,
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
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    CLIPVisionConfig,
    GenerationConfig,
    JambaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import flashmap_hf
from flashmap_hf import FlashMapConfig, FlashMapDrafter, FlashMapGenerationConfig
from flashmap_hf.compatibility import is_pure
from flashmap_hf.head import unembedding_rows

START = PROMPT.shape[1]


def refused(target: Any, drafter: Any, message: str, *args: Any, **kwargs: Any) -> str:
    """The message of the ValueError that a call ends with; asserts that no model has worked for it."""
    forwards: list[str] = []
    handles = [
        model.register_forward_pre_hook(lambda module, args, name=name: forwards.append(name))
        for name, model in (("target", target), ("drafter", drafter))
        if isinstance(model, torch.nn.Module)
    ]
    try:
        with pytest.raises(ValueError, match=message) as caught:
            target.generate(*args, assistant_model=drafter, **(PLAIN | {"max_new_tokens": 4} | kwargs))
    finally:
        for handle in handles:
            handle.remove()
    assert forwards == []
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith((".", "model"))
    assert len(said) < 260
    return said


# --- arguments of the call ------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "num_beams": ({"num_beams": 2}, "num_beams=2.*drop"),
    "num_beams with sampling": ({"num_beams": 3, "do_sample": True}, "num_beams=3"),
    "use_cache": ({"use_cache": False}, "use_cache=False.*drop use_cache"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha.*drop"),
    "dola_layers": ({"dola_layers": "low"}, "dola_layers.*drop"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens.*drop"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "assistant_early_exit.*drop"),
    "use_mtp": ({"use_mtp": True}, "use_mtp.*drop"),
    "speculation_type": ({"speculation_type": "dflash"}, "speculation_type.*drop"),
    "assistant_ensemble_weight": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight.*drop"),
    "paged": ({"cache_implementation": "paged"}, "cache_implementation='paged'.*drop"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus=True.*a drafter"),
    "custom_generate": ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate.*drop"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_are_refused(case):
    target, _ = scene()
    kwargs, message = ARGUMENTS[case]
    refused(target, make_oracle(target), message, PROMPT, **kwargs)


@pytest.mark.parametrize("name", ["num_beams", "penalty_alpha", "use_cache"])
def test_they_are_refused_from_a_generation_config_too(name):
    target, _ = scene()
    kwargs, message = ARGUMENTS[name]
    refused(target, make_oracle(target), message, PROMPT, generation_config=GenerationConfig(**kwargs))


def test_embeddings_are_refused():
    target, _ = scene()
    embeds = target.get_input_embeddings()(PROMPT).detach()
    refused(target, make_oracle(target), "inputs_embeds.*input_ids", inputs_embeds=embeds)
    refused(target, make_oracle(target), "inputs_embeds.*input_ids", PROMPT, inputs_embeds=embeds)


def test_shared_noise_needs_the_quantile_coupling():
    target, _ = scene()
    drafter = tiny_drafter(target, coupling="independent")
    call = FlashMapGenerationConfig(verification="shared_noise")
    refused(
        target,
        drafter,
        "shared_noise.*'independent'.*use verification='rejection'",
        PROMPT,
        generation_config=call,
        do_sample=True,
    )


def test_values_that_mean_the_default_are_fine():
    target, text = scene()
    settings = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "synced_gpus": False, "use_mtp": False}
    found, _ = run(target, taught(target, text), max_new_tokens=4, custom_generate=None, **settings)
    assert found.tolist() == text[:, : START + 4].tolist()


# --- targets --------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
RECURRENT = {
    "mamba": MambaConfig(**SMALL, hidden_size=16, state_size=4, num_hidden_layers=2),
    "jamba": JambaConfig(
        **SMALL,
        **HEADS,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "qwen3_next": Qwen3NextConfig(
        **SMALL,
        **HEADS,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_targets_are_refused(family):
    target = AutoModelForCausalLM.from_config(RECURRENT[family]).eval()
    drafter = make(FlashMapDrafter, target)
    refused(target, drafter, f"{type(target).__name__}.*recurrent state.*without the drafter", PROMPT)


ENCODER_DECODERS = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
        )
    ),
}


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoder_decoders_are_refused(family):
    target = ENCODER_DECODERS[family]().eval()
    drafter = tiny_drafter(scene()[0])
    refused(target, drafter, f"{type(target).__name__} is an encoder-decoder.*decoder-only", PROMPT)


@pytest.mark.parametrize(
    ("other", "fact", "expected", "found"),
    [
        ({"hidden_size": 48}, "hidden size", 48, 32),
        ({"num_hidden_layers": 3}, "number of layers", 3, 2),
        ({"vocab_size": len(VOCABULARY) + 8}, "vocabulary size", len(VOCABULARY) + 8, len(VOCABULARY)),
    ],
)
def test_a_drafter_for_another_target(other, fact, expected, found):
    target = tiny_target(31, name_or_path="acme/target")
    stranger = tiny_target(31, name_or_path="acme/stranger", **other)
    drafter = make_oracle(stranger)
    said = refused(target, drafter, fact, PROMPT)
    assert f"acme/stranger ({fact} {expected})" in said
    assert f"acme/target ({fact} {found})" in said


def test_a_drafter_for_another_tokenizer():
    target, text = scene()
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer()
    other.add_tokens(["<another>"])
    drafter = make(FlashMapDrafter, target, tokenizer=other, target_name="acme/stranger")
    said = refused(target, drafter, "vocabulary hash", PROMPT, tokenizer=tokenizer)
    assert "acme/stranger" in said
    assert drafter.config.tokenizer_hash in said
    fitting = make(FlashMapDrafter, target, tokenizer=tokenizer)
    found, _ = run(target, fitting, tokenizer=tokenizer, max_new_tokens=4)
    assert found.tolist() == text[:, : START + 4].tolist()


def test_check_target_is_public_and_says_the_same():
    target, _ = scene()
    config = FlashMapConfig(target_hidden_size=48, target_num_layers=2, vocab_size=len(VOCABULARY))
    with pytest.raises(ValueError, match=r"hidden size 48.*hidden size 32"):
        flashmap_hf.check_target(config, target)


def test_a_target_that_sees():
    """Images go into the prefill alone, as in plain decoding."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=tiny_target(31).config, image_token_index=60)
    torch.manual_seed(0)
    target = LlavaForConditionalGeneration(config).eval()
    prompt = torch.tensor([[5, 60, 60, 60, 60, 7, 8]])
    images = {"pixel_values": torch.randn(1, 3, 8, 8)}
    plain = target.generate(prompt, **PLAIN, **images, max_new_tokens=12)
    oracle = make_oracle(target)
    oracle.teach(target, plain, [9], **images)
    found, stats = run(target, oracle, prompt, max_new_tokens=12, **images)
    assert found.tolist() == plain.tolist()
    assert stats.accepted > 0


# --- drafters that cannot help: plain decoding, one warning ---------------------------------------------------------


def falls_back(drafter: Any, **kwargs: Any) -> tuple[str, Any]:
    target, text = scene()
    with complaints() as found:
        ours, stats = run(target, drafter, max_new_tokens=12, **kwargs)
    assert ours.tolist() == text[:, : START + 12].tolist()
    (warning,) = found
    assert (stats.calls, stats.plain_calls, stats.committed, stats.target_steps) == (1, 1, 12, 12)
    assert (stats.drafted, stats.accepted) == (0, 0)
    return warning, stats


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["norm.weight", "head.readout_scale", "context_encoder.fuse.weight"])
def test_weights_that_are_not_finite(part, value):
    drafter = tiny_drafter(scene()[0])
    with torch.no_grad():
        drafter.get_parameter(part).fill_(value)
    warning, _ = falls_back(drafter)
    assert re.search("not finite.*without it", warning)


def test_a_drafter_without_weights():
    warning, _ = falls_back(tiny_drafter(scene()[0]).to("meta"))
    assert re.search("meta device.*without the drafter", warning)


def test_one_warning_with_processors_and_sampling():
    target, _ = scene()
    drafter = tiny_drafter(target)
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    with complaints() as found:
        _, stats = run(target, drafter, max_new_tokens=12, do_sample=True, temperature=0.8, repetition_penalty=1.2)
    assert len(found) == 1
    assert (stats.plain_calls, stats.committed) == (1, 12)


# --- devices and dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coupling", ["quantile", "independent"])
def test_dtypes_mix(target_dtype, drafter_dtype, coupling):
    """In bfloat16 a block may round otherwise than single steps, so only float32 promises the same text."""
    target = tiny_target(31, dtype=target_dtype)
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=8)
    drafter = tiny_drafter(target, coupling=coupling).to(drafter_dtype)
    with complaints() as said:
        found, stats = run(target, drafter, max_new_tokens=8)
        torch.manual_seed(0)
        sampled, _ = run(target, drafter, max_new_tokens=8, do_sample=True)
    assert said == []
    assert stats.drafted > 0
    assert sampled.shape == plain.shape
    if target_dtype == torch.float32:
        assert found.tolist() == plain.tolist()


def test_oracle_with_a_bfloat16_target():
    target = tiny_target(31, dtype=torch.bfloat16)
    plain = target.generate(PROMPT, **PLAIN, max_new_tokens=8)
    found, stats = run(target, taught(target, plain), max_new_tokens=8)
    assert stats.accepted > 0
    assert found.shape == plain.shape


def test_an_offloaded_target():
    """accelerate keeps the weights elsewhere and the modules on the meta device; they are called, never read."""
    target, text = scene()
    offloaded = tiny_target(31)
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert offloaded.get_output_embeddings().weight.device.type == "meta"
    drafter = tiny_drafter(target)
    found, stats = run(offloaded, drafter, max_new_tokens=8)
    assert found.tolist() == text[:, : START + 8].tolist()
    assert stats.drafted > 0
    _, expected = run(target, drafter, max_new_tokens=8)
    assert (stats.accepted, stats.drafted_by_position) == (expected.accepted, expected.drafted_by_position)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ids", [11, torch.tensor([3, 90, 7])], ids=["first", "chosen"])
def test_rows_of_an_offloaded_unembedding(ids, bias):
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 100, bias=bias)
    expected = head.weight.detach().clone()[:ids] if isinstance(ids, int) else head.weight.detach().clone()[ids]
    cpu_offload(head, execution_device=torch.device("cpu"))
    rows = unembedding_rows(head, ids, 32)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6 if bias else 0)


# --- which processors are known to be pure --------------------------------------------------------------------------


def test_every_processor_of_a_normal_call_is_pure():
    target, _ = scene()
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.9,
        epsilon_cutoff=1e-4,
        eta_cutoff=1e-4,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        bad_words_ids=[[3]],
        suppress_tokens=[4],
        begin_suppress_tokens=[5],
        min_new_tokens=2,
        forced_eos_token_id=1,
        eos_token_id=1,
        renormalize_logits=True,
        remove_invalid_values=True,
        max_new_tokens=8,
    )
    seen = []

    class Spy(flashmap_hf.FlashMapCandidateGenerator):
        def __init__(self, *args: Any) -> None:
            seen.extend(args[3])
            super().__init__(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashmap_hf.doors.FlashMapCandidateGenerator", Spy)
        target.generate(PROMPT, generation_config=config, assistant_model=tiny_drafter(target))
    assert len(seen) >= 15
    assert all(is_pure(processor) for processor in seen)

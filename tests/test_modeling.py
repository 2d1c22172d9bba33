"""The drafter: shapes, conditioning on noise and context, saving, checkpointing, and the target left alone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from flashmap_hf import FlashMapConfig, FlashMapDrafter


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1,
        )
    ).eval()  # fmt: skip


def make(target: LlamaForCausalLM, **overrides: object) -> FlashMapDrafter:
    torch.manual_seed(1)
    return FlashMapDrafter.from_target(target, window=6, block_size=3, **overrides).eval()


def inputs(target: LlamaForCausalLM, drafter: FlashMapDrafter, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    width = len(drafter.config.tap_layers or []) * 32
    return {
        "taps": torch.randn(batch, 6, width, generator=generator),
        "anchor_embeds": torch.randn(batch, 32, generator=generator),
        "rows": target.get_output_embeddings().weight.detach(),
        "u": torch.rand(batch, 3, generator=generator),
    }


def test_shapes_and_endpoint(target: LlamaForCausalLM) -> None:
    drafter = make(target)
    output = drafter(**inputs(target, drafter))
    assert output.z_1.shape == (2, 3, 32) and output.logits.shape == (2, 3, 50)
    assert drafter(**inputs(target, drafter), num_steps=2).z_1.shape == (2, 3, 32)


def test_every_input_matters(target: LlamaForCausalLM) -> None:
    drafter = make(target)
    base = inputs(target, drafter)
    reference = drafter(**base).z_1
    for name in ("taps", "anchor_embeds", "u"):
        changed = base | {name: base[name].flip(-1)}  # a rescaling would be normed away
        assert not torch.allclose(drafter(**changed).z_1, reference, atol=1e-4), name
    # the block is drafted jointly: noise of the last position reaches the first
    u = base["u"].clone()
    u[:, -1] = 0.99
    assert not torch.allclose(drafter(**(base | {"u": u})).z_1[:, 0], reference[:, 0], atol=1e-5)


@pytest.mark.parametrize("anchored", [False, True])
def test_anchored_slots_know_the_anchor_and_the_newest_position_without_attention(
    target: LlamaForCausalLM, anchored: bool
) -> None:
    drafter = make(target, anchored_slots=anchored)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "o_proj" in name:
                weight.zero_()
    base = inputs(target, drafter)
    reference = drafter(**base).z_1
    newest, older = base["taps"].clone(), base["taps"].clone()
    newest[:, -1], older[:, :-1] = base["taps"][:, -1].flip(-1), base["taps"][:, :-1].flip(-1)
    for changed, read in (
        ({"anchor_embeds": base["anchor_embeds"].flip(-1)}, anchored),
        ({"taps": newest}, anchored),
        ({"taps": older}, False),
    ):
        assert torch.allclose(drafter(**(base | changed)).z_1, reference, atol=1e-5) != read


def test_a_config_of_an_older_version_has_no_anchored_slots(target: LlamaForCausalLM) -> None:
    fields = make(target).config.to_dict()
    assert fields.pop("anchored_slots") is True
    assert FlashMapConfig(**fields).anchored_slots is False


def test_hidden_noise_is_not_zero_noise(target: LlamaForCausalLM) -> None:
    drafter = make(target)
    with torch.no_grad():
        drafter.noise_embedding.hidden_u.normal_()
    base = inputs(target, drafter)
    hidden = drafter(**(base | {"u": None})).z_1
    assert not torch.allclose(hidden, drafter(**(base | {"u": torch.zeros(2, 3)})).z_1, atol=1e-4)
    nan = drafter(**(base | {"u": torch.full((2, 3), torch.nan)})).z_1
    torch.testing.assert_close(nan, hidden)


def test_masked_positions_do_not_matter(target: LlamaForCausalLM) -> None:
    drafter = make(target)
    base = inputs(target, drafter)
    mask = torch.tensor([[False, False, True, True, True, True]]).expand(2, 6)
    changed = base["taps"].clone()
    changed[:, :2] = 100.0
    torch.testing.assert_close(drafter(**base, mask=mask).z_1, drafter(**(base | {"taps": changed}), mask=mask).z_1)
    # a shorter window is the same as a masked one: only differences of positions count
    torch.testing.assert_close(
        drafter(**(base | {"taps": base["taps"][:, 2:]})).z_1, drafter(**base, mask=mask).z_1, rtol=1e-4, atol=1e-5
    )


def test_independent_coupling_reads_the_noise_it_is_given(target: LlamaForCausalLM) -> None:
    drafter = make(target, coupling="independent")
    base = inputs(target, drafter) | {"u": None}
    with pytest.raises(ValueError, match="noise"):
        drafter(**base)
    first, second = torch.randn(2, 2, 3, 32, generator=torch.Generator().manual_seed(3))
    assert not torch.allclose(drafter(**base, noise=first).z_1, drafter(**base, noise=second).z_1, atol=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"draft_vocab_size": 10},
        {"head": "low_rank", "head_rank": 4},
        {"draft_vocab_size": 10, "transition_rank": 5},
    ],
    ids=str,
)
def test_save_and_load_is_bit_equal(target: LlamaForCausalLM, tmp_path: Path, overrides: dict[str, object]) -> None:
    drafter = make(target, **overrides)
    if "draft_vocab_size" in overrides:
        drafter.head.draft_vocab_ids.copy_(torch.arange(10) * 3 + 1)
    if drafter.head.transition is not None:
        torch.nn.init.normal_(drafter.head.transition.readout.weight)
    drafter.save_pretrained(tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir() if p.name.startswith("model")) == [".safetensors"]
    for cls in (FlashMapDrafter, AutoModel):
        loaded = cls.from_pretrained(tmp_path)
        assert isinstance(loaded, FlashMapDrafter)
        assert loaded.config.to_dict() | {"_name_or_path": ""} == drafter.config.to_dict()
        states = loaded.state_dict()
        assert states.keys() == drafter.state_dict().keys()
        assert all(torch.equal(states[n], t) for n, t in drafter.state_dict().items())


def test_an_untrained_transition_changes_nothing(target: LlamaForCausalLM) -> None:
    """`post_init` fills linear layers with small noise, but not this one."""
    drafter = make(target, transition_rank=5)
    output = drafter(**inputs(target, drafter))
    assert torch.equal(drafter.head.biased(output.logits, output.z_1, torch.randint(51, (2, 3))), output.logits)


@pytest.mark.parametrize(
    ("saved", "asked", "message"),
    [
        (None, 5, "missing head.transition"),
        (5, None, "unexpected head.transition"),
        (5, 6, "mismatched head.transition"),
    ],
)
def test_a_transition_that_the_config_does_not_describe_is_refused(
    target: LlamaForCausalLM, tmp_path: Path, saved: int | None, asked: int | None, message: str
) -> None:
    make(target, transition_rank=saved).save_pretrained(tmp_path)
    make(target, transition_rank=asked).config.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=message):
        FlashMapDrafter.from_pretrained(tmp_path)


def test_nothing_of_the_target_is_inside(target: LlamaForCausalLM) -> None:
    before = {n: t.clone() for n, t in target.state_dict().items()}
    drafter = make(target)
    inside = {t.data_ptr() for t in drafter.state_dict().values()}
    assert inside.isdisjoint(t.data_ptr() for t in target.state_dict().values())
    assert all(torch.equal(before[n], t) for n, t in target.state_dict().items())


def test_gradient_checkpointing_gives_the_same_gradients(target: LlamaForCausalLM) -> None:
    gradients = []
    for checkpointing in (False, True):
        drafter = make(target).train()
        if checkpointing:
            drafter.gradient_checkpointing_enable()
        drafter(**inputs(target, drafter)).logits.square().mean().backward()
        gradients.append({n: p.grad for n, p in drafter.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


def test_readout_starts_at_unit_scale(target: LlamaForCausalLM) -> None:
    drafter = make(target)
    endpoint = torch.nn.functional.rms_norm(torch.randn(64, 1, 32), (32,))
    spread = drafter.head(endpoint, target.get_output_embeddings().weight).std().item()
    assert 0.8 < spread < 1.2


def test_wrong_targets_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    tiny = T5Config(vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
    with pytest.raises(ValueError, match="encoder-decoder"):
        FlashMapDrafter.from_target(T5ForConditionalGeneration(tiny))

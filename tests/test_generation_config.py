"""Where the options of a call come from, which source wins, and that nothing is written back."""

import copy
from typing import Any

import pytest
import torch
from oracle import BLOCK, PLAIN, PROMPT, complaints, run, scene, taught, tiny_target
from transformers import GenerationConfig

import flashmap_hf
from flashmap_hf import FlashMapGenerationConfig
from flashmap_hf.generation_config import DraftOptions

START = PROMPT.shape[1]
NONE = FlashMapGenerationConfig()
SURE = 6.0  # logit of the oracle's token; its probability is then about 0.7


def block_length(target: Any, drafter: Any, **kwargs: Any) -> int:
    """The longest block that a call drafted."""
    _, stats = run(target, drafter, **({"max_new_tokens": 12} | kwargs))
    assert stats.drafted > 0
    return len(stats.drafted_by_position)


def given(source: str, name: str, value: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A target, an oracle and arguments of `generate`, with one option set at `source`."""
    shared, text = scene()
    target = copy.copy(shared)
    target.generation_config = copy.deepcopy(shared.generation_config)
    oracle = taught(shared, text)
    kwargs: dict[str, Any] = {}
    if source == "generate":
        kwargs[name] = value
    elif source == "GenerationConfig":
        kwargs["generation_config"] = GenerationConfig(**{name: value})
    elif source == "FlashMapGenerationConfig":
        kwargs["generation_config"] = FlashMapGenerationConfig(**{name: value})
    elif source == "target":
        setattr(target.generation_config, name, value)
    elif source == "drafter":
        setattr(oracle.generation_config, name, value)
    return target, oracle, kwargs


SOURCES = ["generate", "GenerationConfig", "FlashMapGenerationConfig", "target", "drafter"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("tokens", [1, 2, BLOCK, 20])
def test_num_assistant_tokens_is_honoured(source, tokens):
    target, oracle, kwargs = given(source, "num_assistant_tokens", tokens)
    assert block_length(target, oracle, **kwargs) == min(tokens, BLOCK)


@pytest.mark.parametrize("source", SOURCES)
def test_assistant_confidence_threshold_is_honoured(source):
    """0.4 is the library's default for other assistants: unset it means nothing, set it counts."""
    target, oracle, kwargs = given(source, "assistant_confidence_threshold", 0.4)
    oracle.confidence = SURE
    p = float(torch.softmax(torch.tensor([SURE] + [0.0] * (oracle.config.vocab_size - 1)), 0)[0])
    expected = sum(p**k >= 0.4 for k in range(1, BLOCK + 1))
    assert 0 < expected < BLOCK
    assert block_length(target, oracle, **kwargs) == expected


def test_unset_the_whole_block_is_drafted():
    target, text = scene()
    oracle = taught(target, text)
    oracle.confidence = 1.0
    assert block_length(target, oracle) == BLOCK


def test_a_threshold_of_one_drafts_nothing_and_is_still_right():
    target, text = scene()
    oracle = taught(target, text)
    oracle.confidence = SURE
    found, stats = run(target, oracle, max_new_tokens=12, assistant_confidence_threshold=1.0)
    assert found.tolist() == text[:, : START + 12].tolist()
    assert stats.drafted == 0


@pytest.mark.parametrize("winner", range(4))
def test_the_sources_in_their_order(winner):
    """`generate`, its generation config, the target's, the drafter's: whoever comes first counts."""
    values: list[int | None] = [None] * winner + list(range(1, 5 - winner))
    kwargs, call, target, drafter = values
    configs = [GenerationConfig(num_assistant_tokens=v) for v in (call, target, drafter)]
    found = DraftOptions.resolve({"num_assistant_tokens": kwargs}, *configs, block_size=9, num_steps=1)
    assert found.num_assistant_tokens == 1


def test_the_sources_in_their_order_through_generate():
    target, oracle, _ = given("drafter", "num_assistant_tokens", 1)
    assert block_length(target, oracle) == 1
    target.generation_config.num_assistant_tokens = 2
    assert block_length(target, oracle) == 2
    call = GenerationConfig(num_assistant_tokens=3)
    assert block_length(target, oracle, generation_config=call) == 3
    assert block_length(target, oracle, generation_config=call, num_assistant_tokens=4) == 4


def test_verification_and_steps_may_come_from_everywhere():
    def resolved(kwargs: dict[str, Any], *configs: GenerationConfig) -> tuple[str, int]:
        found = DraftOptions.resolve(kwargs, *configs, block_size=4, num_steps=1)
        return found.verification, found.num_steps

    one_hot = FlashMapGenerationConfig(verification="one_hot", num_steps=2)
    rejection = FlashMapGenerationConfig(verification="rejection", num_steps=1)
    assert resolved({}, NONE, NONE, NONE) == ("auto", 1)
    assert resolved({}, NONE, NONE, one_hot) == ("one_hot", 2)
    assert resolved({}, NONE, rejection, one_hot) == ("rejection", 1)
    assert resolved({}, one_hot, rejection, NONE) == ("one_hot", 2)
    assert resolved({"verification": "rejection"}, one_hot, NONE, NONE) == ("rejection", 2)
    assert resolved({}, GenerationConfig(verification="one_hot"), NONE, NONE) == ("one_hot", 1)


def test_verification_as_a_keyword_beside_a_config_that_has_it():
    """transformers takes keywords that the generation config knows."""
    target, text = scene()
    oracle = taught(target, text, block_size=2)
    rules = []
    rule = flashmap_hf.FlashMapCandidateGenerator._rule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            flashmap_hf.FlashMapCandidateGenerator, "_rule", lambda self, s: rules.append(rule(self, s)) or rules[-1]
        )
        run(
            target,
            oracle,
            generation_config=FlashMapGenerationConfig(max_new_tokens=3),
            verification="one_hot",
            do_sample=True,
        )
    assert rules == ["one_hot"]


# --- nothing is written back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_no_object_of_the_user_changes(source):
    target, oracle, kwargs = given(source, "num_assistant_tokens", 3)
    objects = [target.generation_config, oracle.generation_config, oracle.config, target.config]
    objects += [kwargs["generation_config"]] if "generation_config" in kwargs else []
    before = [copy.deepcopy(vars(thing)) for thing in objects]
    weights = {name: value.clone() for name, value in oracle.state_dict().items()}
    attributes = set(vars(oracle)), set(vars(target))
    for settings in ({}, {"do_sample": True, "assistant_confidence_threshold": 0.1}, {"repetition_penalty": 1.3}):
        run(target, oracle, max_new_tokens=8, **kwargs, **settings)
    assert [vars(thing) for thing in objects] == before
    assert (set(vars(oracle)), set(vars(target))) == attributes
    assert all(torch.equal(value, weights[name]) for name, value in oracle.state_dict().items())
    assert oracle.training is False


def test_the_next_call_does_not_remember():
    target, text = scene()
    oracle = taught(target, text)
    assert block_length(target, oracle, num_assistant_tokens=1) == 1
    assert block_length(target, oracle) == BLOCK


# --- bad values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_assistant_tokens": 0}, "num_assistant_tokens=0"),
        ({"num_assistant_tokens": -3}, "num_assistant_tokens=-3"),
        ({"num_assistant_tokens": 2.5}, "num_assistant_tokens=2.5"),
        ({"assistant_confidence_threshold": 1.5}, "assistant_confidence_threshold=1.5"),
        ({"assistant_confidence_threshold": -0.1}, "assistant_confidence_threshold=-0.1"),
        ({"assistant_confidence_threshold": "high"}, "assistant_confidence_threshold='high'"),
    ],
)
def test_bad_values_are_refused_before_the_first_forward(settings, message):
    target, text = scene()
    forwards = []
    handle = target.register_forward_pre_hook(lambda *args: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=message):
            run(target, taught(target, text, wrong=()), max_new_tokens=4, **settings)
        assert len(forwards) == 1  # the oracle's lesson
    finally:
        handle.remove()


@pytest.mark.parametrize("config", [GenerationConfig, FlashMapGenerationConfig])
def test_unknown_verification(config):
    target, text = scene()
    call = config()
    call.verification = "hope"
    with pytest.raises(ValueError, match="verification='hope': choose one of auto, rejection, one_hot, shared_noise"):
        run(target, taught(target, text), generation_config=call, max_new_tokens=4)
    with pytest.raises(ValueError, match="verification='hope'"):
        FlashMapGenerationConfig(verification="hope")


def test_num_steps_out_of_range():
    with pytest.raises(ValueError, match="num_steps=3"):
        FlashMapGenerationConfig(num_steps=3)


# --- files ----------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    asked = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.4, "do_sample": True, "temperature": 0.5}
    config = FlashMapGenerationConfig(verification="one_hot", num_steps=2, **asked)
    with complaints() as found:
        config.save_pretrained(tmp_path)
        loaded = FlashMapGenerationConfig.from_pretrained(tmp_path)
    assert found == []
    assert type(loaded) is FlashMapGenerationConfig
    for name in ("verification", "num_steps", "num_assistant_tokens", "assistant_confidence_threshold", "temperature"):
        assert getattr(loaded, name) == getattr(config, name)
    assert loaded.to_dict() == config.to_dict()
    assert FlashMapGenerationConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_a_saved_config_works_in_a_call(tmp_path):
    FlashMapGenerationConfig(num_assistant_tokens=2).save_pretrained(tmp_path)
    target, text = scene()
    config = FlashMapGenerationConfig.from_pretrained(tmp_path)
    assert block_length(target, taught(target, text), generation_config=config) == 2


def test_the_plain_class_reads_it_too(tmp_path):
    """A target's folder may hold one: `AutoModelForCausalLM` reads it as a GenerationConfig with more fields."""
    FlashMapGenerationConfig(verification="one_hot", num_assistant_tokens=2).save_pretrained(tmp_path)
    target = tiny_target(31)
    target.generation_config = GenerationConfig.from_pretrained(tmp_path)
    text = target.generate(PROMPT, **PLAIN, max_new_tokens=12)
    assert block_length(target, taught(target, text)) == 2

"""The wrapped `generate`: drafters are recognised, whatever wraps them; everything else is as if we were not there."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from oracle import PLAIN, PROMPT, Oracle, complaints, fixed, run, scene, taught, tiny_drafter, tiny_target
from transformers import GenerationMixin

import flashmap_hf
from flashmap_hf import FlashMapCandidateGenerator, FlashMapDrafter
from flashmap_hf.doors import as_drafter
from flashmap_hf.hook import install

ROOT = Path(__file__).resolve().parents[1]
START = PROMPT.shape[1]


# --- installing -----------------------------------------------------------------------------------------------------


def test_installing_again_changes_nothing():
    before = dict(vars(GenerationMixin))
    install()
    importlib.reload(flashmap_hf)
    assert {name for name, value in vars(GenerationMixin).items() if before.get(name) is not value} == set()


FRESH = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
import flashmap_hf
from oracle import PROMPT, run, scene, taught, tiny_drafter
target, text = scene()
old = tiny_drafter(target)
importlib.reload(sys.modules["flashmap_hf.hook"])
importlib.reload(flashmap_hf)
for name in [name for name in sys.modules if name.split(".")[0] in ("flashmap_hf", "oracle")]:
    del sys.modules[name]
import flashmap_hf
from oracle import taught
new = taught(target, text)
for drafter in (old, new):
    found = target.generate(PROMPT, assistant_model=drafter, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found.tolist() == text[:, : found.shape[1]].tolist()
with flashmap_hf.record() as stats:
    target.generate(PROMPT, assistant_model=new, max_new_tokens=8, do_sample=False, pad_token_id=0)
assert stats.accepted > 0
print("fine")
"""


def test_a_second_copy_of_the_package_works_beside_the_first():
    """What a notebook does that reloads or re-imports everything: drafters of both copies are recognised."""
    finished = subprocess.run(
        [sys.executable, "-c", FRESH, str(ROOT / "tests")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert finished.stdout.strip() == "fine", finished.stderr


def test_the_wrapped_methods_keep_their_names_and_signatures():
    for name in ("generate", "_assisted_decoding", "_get_candidate_generator"):
        method = getattr(GenerationMixin, name)
        assert method.__name__ == name
        assert "self" in inspect.signature(method).parameters
    assert "assistant_model" in inspect.signature(GenerationMixin.generate).parameters


# --- other assistants -----------------------------------------------------------------------------------------------

STOCK = """
import json, sys
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
if sys.argv[1] == "with":
    import flashmap_hf

fields = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
              max_position_embeddings=128, initializer_range=0.4, bos_token_id=None, eos_token_id=None, pad_token_id=0)
torch.manual_seed(0)
target = LlamaForCausalLM(LlamaConfig(**fields)).eval()
assistant = LlamaForCausalLM(LlamaConfig(**fields | {"num_hidden_layers": 1})).eval()
with torch.no_grad():  # near enough to be accepted now and then
    assistant.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    assistant.lm_head.weight.copy_(target.lm_head.weight)
calls = {"target": 0, "assistant": 0}
for name, model in (("target", target), ("assistant", assistant)):
    model.register_forward_pre_hook(lambda module, args, name=name: calls.__setitem__(name, calls[name] + 1))
prompt = torch.arange(5)[None]
report = {}

def run(name, **kwargs):
    calls.update(target=0, assistant=0)
    torch.manual_seed(1)
    try:
        outcome = target.generate(prompt, max_new_tokens=16, **kwargs).tolist()
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    config = assistant.generation_config
    report[name] = [outcome, dict(calls), str(config.num_assistant_tokens), str(target.generation_config.to_dict())]

run("plain", do_sample=False)
run("sampled", do_sample=True)
run("greedy", do_sample=False, assistant_model=assistant)
run("sampled with assistant", do_sample=True, assistant_model=assistant)
run("two tokens", do_sample=False, assistant_model=assistant, num_assistant_tokens=2)
run("lookup", do_sample=False, prompt_lookup_num_tokens=3)
run("early exit", do_sample=False, assistant_early_exit=1)
run("beams", num_beams=2)
run("bad beams", num_beams=2, assistant_model=assistant)
run("config", generation_config=GenerationConfig(do_sample=False), assistant_model=assistant)
run("nonsense", foo=1)
run("not a model", assistant_model="a string")
print(json.dumps(report))
"""


def stock(how: str) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-c", STOCK, how],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def test_other_assistants_behave_as_without_the_package():
    without, with_package = stock("without"), stock("with")
    assert with_package == without
    outcome, calls, *_ = without["greedy"]
    assert isinstance(outcome, list)
    assert calls["assistant"] > 0


@pytest.mark.parametrize("assistant", [None, "a string", 3, torch.nn.Linear(2, 2), tiny_target])
def test_what_is_no_drafter(assistant):
    assert as_drafter(assistant) is None


# --- wrapped models -------------------------------------------------------------------------------------------------


def lora(model: torch.nn.Module, modules: list[str], **kwargs: Any) -> peft.PeftModel:
    """A LoRA adapter that changes what the model does."""
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False, **kwargs)
    return peft.get_peft_model(model, config).eval()


def test_a_drafter_with_a_lora_adapter():
    target, text = scene()
    bare = tiny_drafter(target)
    wrapped = lora(tiny_drafter(target), ["q_proj", "v_proj", "gate_proj"])
    assert isinstance(as_drafter(wrapped), FlashMapDrafter)
    logits = []
    handle = as_drafter(wrapped).register_forward_hook(lambda module, args, output: logits.append(output.logits))
    try:
        with complaints() as said:
            found, stats = run(target, wrapped, max_new_tokens=8)
    finally:
        handle.remove()
    assert said == []
    assert found.tolist() == text[:, : START + 8].tolist()
    assert stats.drafted > 0
    bare_logits = []
    handle = bare.register_forward_hook(lambda module, args, output: bare_logits.append(output.logits))
    run(target, bare, max_new_tokens=8)
    handle.remove()
    assert not torch.equal(logits[0], bare_logits[0])


def test_an_oracle_with_a_lora_adapter_is_accepted():
    target, text = scene()
    oracle = taught(target, text)
    _, stats = run(target, lora(oracle, ["q_proj"]), max_new_tokens=11)
    assert stats.accepted == stats.drafted == 8


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_the_adapter_of_a_lora_target_stays_active(task):
    base = tiny_target(31)
    bare = base.generate(PROMPT, **PLAIN, max_new_tokens=12)
    target = lora(base, ["q_proj", "v_proj", "down_proj"], task_type=task)
    plain = target.generate(input_ids=PROMPT, **PLAIN, max_new_tokens=12)
    assert plain.tolist() != bare.tolist()
    oracle = fixed(Oracle.from_target(base, num_hidden_layers=1, block_size=4))
    oracle.teach(base, plain)  # peft has put its layers into the base
    with complaints() as said, flashmap_hf.record() as stats:
        found = target.generate(input_ids=PROMPT, **PLAIN, max_new_tokens=12, assistant_model=oracle)
    assert found.tolist() == plain.tolist()
    assert stats.accepted > 0
    assert said == []
    with target.disable_adapter():
        assert (
            target.generate(input_ids=PROMPT, **PLAIN, max_new_tokens=12, assistant_model=oracle).tolist()
            == bare.tolist()
        )


# --- the call itself ------------------------------------------------------------------------------------------------


def test_the_assistant_may_come_by_position():
    target, text = scene()
    names = ["inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"]
    oracle = taught(target, text)
    with flashmap_hf.record() as stats:
        found = target.generate(PROMPT, *[None] * len(names), oracle, **PLAIN, max_new_tokens=8)
    assert found.tolist() == text[:, : START + 8].tolist()
    assert stats.accepted > 0


@pytest.mark.parametrize("how", ["inputs", "input_ids", "with a mask", "list of processors"])
def test_inputs_in_every_form(how):
    target, text = scene()
    forms: dict[str, dict[str, Any]] = {
        "inputs": {"inputs": PROMPT},
        "input_ids": {"input_ids": PROMPT},
        "with a mask": {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)},
        "list of processors": {"input_ids": PROMPT, "logits_processor": [], "stopping_criteria": []},
    }
    found = target.generate(**forms[how], assistant_model=taught(target, text), **PLAIN, max_new_tokens=8)
    assert found.tolist() == text[:, : START + 8].tolist()


def test_typing_errors_are_found_as_ever():
    target, text = scene()
    with pytest.raises(ValueError, match="max_new_token"):
        run(target, taught(target, text), max_new_token=3)


def test_the_stock_door_gives_our_generator():
    """Whoever asks transformers for the candidate generator of a drafter gets ours."""
    target, text = scene()
    oracle = taught(target, text)
    config = target.generation_config.__class__(max_length=20, do_sample=False)
    found = target._get_candidate_generator(config, PROMPT, PROMPT, [], {}, assistant_model=oracle)
    assert isinstance(found, FlashMapCandidateGenerator)
    assert found.options.num_assistant_tokens == 4


def test_options_of_one_call_do_not_reach_another():
    """Inside a call, from a stopping criterion, another target generates with another drafter."""
    target, text = scene()
    inner_oracle, outer_oracle = taught(target, text), taught(target, text)
    lengths = []

    def nested(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not lengths:
            _, stats = run(target, inner_oracle, max_new_tokens=12, num_assistant_tokens=1)
            lengths.append(len(stats.drafted_by_position))
        return torch.zeros(1, dtype=torch.bool)

    with flashmap_hf.record() as outer:
        found = target.generate(
            PROMPT, assistant_model=outer_oracle, **PLAIN, max_new_tokens=12, stopping_criteria=[nested],
            num_assistant_tokens=3,
        )  # fmt: skip
    assert found.tolist() == text[:, : START + 12].tolist()
    assert lengths == [1]
    assert len(outer.drafted_by_position) == 3

"""One timed `generate` call."""

import time

import pytest
import torch
from conftest import inputs_of, tiny_drafter, tiny_target

from flashmap_hf import record
from flashmap_hf.runs import Settings, metered, run, seeded

INPUTS = inputs_of(5, 6, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"max_new_tokens": -3}, "max_new_tokens must be at least 1, not -3"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"temperature": -0.5}, "temperature must be 0 .* not -0.5"),
        ({"temperature": float("nan")}, "temperature must be 0 .* not nan"),
        ({"temperature": float("inf")}, "temperature must be 0 .* not inf"),
        ({"verification": "rejection"}, "set a temperature above 0"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Settings(**fields)


def test_settings_become_a_generation_config():
    greedy = Settings(max_new_tokens=7).generation_config()
    assert (greedy.do_sample, greedy.max_new_tokens, greedy.verification) == (False, 7, "auto")
    sampled = Settings(temperature=0.7, verification="rejection").generation_config(output_scores=True)
    assert (sampled.do_sample, sampled.temperature, sampled.verification) == (True, 0.7, "rejection")
    assert sampled.output_scores


def test_what_the_settings_leave_open_comes_from_the_target():
    target = tiny_target()
    plain = run(target, INPUTS, Settings(max_new_tokens=8).generation_config(), seed=0)
    target.generation_config.eos_token_id = plain.tokens[3]
    stopped = run(target, INPUTS, Settings(max_new_tokens=8).generation_config(), seed=0)
    assert stopped.tokens == plain.tokens[: plain.tokens.index(plain.tokens[3]) + 1]


def test_a_plain_run_has_one_forward_per_token(tiny_llama):
    plain = run(tiny_llama, INPUTS, Settings(max_new_tokens=6).generation_config(), seed=0)
    assert len(plain.tokens) == len(plain.forwards) == 6
    assert plain.tokens_per_step == 1.0
    assert plain.tokens_per_second == 6 / plain.seconds
    assert plain.step_ms == pytest.approx(1e3 * sum(plain.forwards[1:]) / 5)
    assert 0 < sum(plain.forwards) < plain.seconds


def test_the_prefill_alone_is_no_step(tiny_llama):
    assert run(tiny_llama, INPUTS, Settings(max_new_tokens=1).generation_config(), seed=0).step_ms is None


def test_forwards_are_those_that_the_statistics_count(tiny_llama):
    config = Settings(max_new_tokens=9).generation_config()
    with record() as stats:
        drafted = run(tiny_llama, INPUTS, config, seed=0, assistant_model=tiny_drafter(tiny_llama))
    assert len(drafted.forwards) == stats.target_steps
    assert drafted.tokens_per_step == stats.tokens_per_step


def test_the_meter_times_forwards_and_leaves_no_hook(monkeypatch):
    target = tiny_target()
    forward = target.model.forward
    monkeypatch.setattr(
        target.model, "forward", lambda *args, **kwargs: (time.sleep(0.03), forward(*args, **kwargs))[1]
    )
    with metered(target) as seconds:
        target(INPUTS["input_ids"])
        target(INPUTS["input_ids"])
    assert len(seconds) == 2
    assert all(second >= 0.03 for second in seconds)
    with pytest.raises(IndexError), metered(target):
        target(torch.tensor([[10**6]]))
    assert not target._forward_hooks
    assert not target._forward_pre_hooks


def test_a_seed_decides_the_sample_and_the_global_generator_is_kept(tiny_llama):
    config = Settings(temperature=1.0, max_new_tokens=12).generation_config()
    before = torch.get_rng_state()
    first, again, other = (run(tiny_llama, INPUTS, config, seed).tokens for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_is_put_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(IndexError), seeded(3, torch.device("cpu")):
        torch.rand(3)[5]
    assert torch.equal(torch.get_rng_state(), before)

"""Streamers: the prompt once, one put per commit, together the output, and `end()` once, however the call stops."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from oracle import (
    PLAIN,
    PROMPT,
    complaints,
    continuation,
    run,
    scene,
    taught,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

START = PROMPT.shape[1]
STOPS: dict[str, dict[str, Any]] = {
    "length": {"max_new_tokens": 12},
    "one token": {"max_new_tokens": 1},
    "inside a block": {"max_new_tokens": 12, "eos_token_id": continuation()[3]},
    "on a bonus token": {"max_new_tokens": 12, "eos_token_id": continuation()[5]},
    "on the first token": {"max_new_tokens": 12, "eos_token_id": continuation()[0]},
    "by a criterion": {
        "max_new_tokens": 12,
        "stopping_criteria": [lambda input_ids, scores, **kwargs: input_ids[:, -1] == continuation()[7]],
    },
    "with a dictionary": {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True},
}


class Recording(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


def words(tokens: torch.Tensor) -> str:
    return tiny_tokenizer().decode(tokens)


@pytest.mark.parametrize("stop", STOPS)
def test_prompt_once_one_put_per_commit_end_once(stop):
    target, text = scene()
    for drafter in (taught(target, text), taught(target, text, [START + 2, START + 4]), tiny_drafter(target)):
        streamer = Recording()
        found, stats = run(target, drafter, streamer=streamer, **STOPS[stop])
        sequences = found if isinstance(found, torch.Tensor) else found.sequences
        prompt, *commits = streamer.puts
        assert prompt.tolist() == PROMPT.tolist()
        assert len(commits) == stats.target_steps
        assert torch.cat(commits).tolist() == sequences[0, START:].tolist()
        assert all(commit.device.type == "cpu" and commit.dtype == torch.long for commit in commits)
        assert streamer.ends == 1


def test_a_plain_fallback_streams_the_same_way():
    target, text = scene()
    streamer = Recording()
    with complaints() as found:
        run(target, taught(target, text), streamer=streamer, guidance_scale=1.5, max_new_tokens=6)
    assert len(found) == 1
    assert streamer.puts[0].tolist() == PROMPT.tolist()
    assert len(streamer.puts) == 7
    assert streamer.ends == 1


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer_prints_what_plain_decoding_prints(skip_prompt, capsys):
    target, text = scene()

    def printed(**kwargs: Any) -> str:
        streamer = TextStreamer(tiny_tokenizer(), skip_prompt=skip_prompt)
        target.generate(PROMPT, **(PLAIN | STOPS["inside a block"]), streamer=streamer, **kwargs)
        return capsys.readouterr().out

    plain = printed()
    assert plain.strip()
    assert printed(assistant_model=taught(target, text)) == plain


def test_text_iterator_streamer_in_a_thread():
    target, text = scene()
    streamer = TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=60)
    call = {"assistant_model": taught(target, text), "streamer": streamer, **PLAIN, **STOPS["inside a block"]}
    worker = threading.Thread(target=target.generate, args=(PROMPT,), kwargs=call)
    worker.start()
    pieces = list(streamer)
    worker.join()
    assert "".join(pieces) == words(text[0, START : START + 4])


def test_two_threads_do_not_mix():
    """Two users, two targets, each with a drafter and a streamer of its own, at once."""
    first, first_text = scene()
    second = tiny_target(7)
    second_text = second.generate(PROMPT, max_new_tokens=12, **PLAIN)
    streamers, workers = [], []
    for target, text in ((first, first_text), (second, second_text)):
        streamers.append(TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=60))
        call = {"assistant_model": taught(target, text), "streamer": streamers[-1], **PLAIN, **STOPS["length"]}
        workers.append(threading.Thread(target=target.generate, args=(PROMPT,), kwargs=call))
    for worker in workers:
        worker.start()
    found = ["".join(streamer) for streamer in streamers]
    for worker in workers:
        worker.join()
    assert found == [words(text[0, START : START + 12]) for text in (first_text, second_text)]


def test_async_text_iterator_streamer():
    target, text = scene()

    async def consume() -> str:
        streamer = AsyncTextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=60)
        call = {"assistant_model": taught(target, text), "streamer": streamer, **PLAIN, **STOPS["on a bonus token"]}
        worker = asyncio.create_task(asyncio.to_thread(target.generate, PROMPT, **call))
        pieces = [piece async for piece in streamer]
        await worker
        return "".join(pieces)

    assert asyncio.run(consume()) == words(text[0, START : START + 6])


def test_an_exception_in_a_streamer_reaches_the_user_and_leaves_nothing():
    """How a stop button ends a call."""

    class Stopped(Exception):
        pass

    class Button(Recording):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.puts) == 3:
                raise Stopped("pressed")

    target, text = scene()
    oracle = taught(target, text)
    with pytest.raises(Stopped, match="pressed"):
        run(target, oracle, streamer=Button(), max_new_tokens=12)
    found, _ = run(target, oracle, max_new_tokens=12)
    assert found.tolist() == text[:, : START + 12].tolist()

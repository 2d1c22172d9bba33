"""The stage of the browser tests: demos served from this process, and browsers that look at them."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import oracle_for
from tab import Tab, start_browser
from tiny_files import write_drafter, write_target

from flashmap_hf import drafters, targets
from flashmap_hf.demo.command import Options, launch
from flashmap_hf.demo.page import Theatre, build
from flashmap_hf.prompts import encode

asked: set[str] = set()  # hosts that this process looked up or connected to, beyond the loopback


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(args[1], tuple):
        asked.add(str(args[1][0]))
    elif event == "socket.getaddrinfo":
        asked.add(str(args[0]))


sys.addaudithook(_watch)


class Demo:
    """A running page: where it is, and what it serves."""

    def __init__(self, target: Path, drafter: Path):
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.theatre = Theatre(str(target), str(drafter), "float32")
        self.page = build(self.theatre)
        self.url = f"http://127.0.0.1:{port}/"
        launch(self.page, Options(port=port), prevent_thread_lock=True, quiet=True)


@pytest.fixture
def serve() -> Iterator[Callable[..., Demo]]:
    """`serve(target, drafter)` starts a demo that ends with the test, and leaves no race behind."""
    demos: list[Demo] = []

    def start(target: Path, drafter: Path) -> Demo:
        demos.append(Demo(target, drafter))
        return demos[-1]

    yield start
    for demo in demos:
        demo.page.close(verbose=False)
        until(lambda demo=demo: not demo.theatre.jobs)
    until(no_race_runs)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target and an untrained drafter for it."""
    root = tmp_path_factory.mktemp("models")
    return write_target(root / "target"), write_drafter(root / "drafter")


@pytest.fixture
def new_tab(tmp_path: Path) -> Iterator[Callable[[], Tab]]:
    """`new_tab()` opens a window of a browser of its own."""
    tabs: list[Tab] = []

    def start() -> Tab:
        tabs.append(Tab(start_browser(tmp_path / f"profile-{len(tabs)}")))
        return tabs[-1]

    yield start
    for tab in tabs:
        tab.driver.quit()


@pytest.fixture
def tab(new_tab: Callable[[], Tab]) -> Tab:
    return new_tab()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target forward takes a moment longer, so that a race can be caught in the middle."""
    load = targets.load

    def load_slow(*args: Any, **kwargs: Any) -> Any:
        target, tokenizer = load(*args, **kwargs)
        target.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        return target, tokenizer

    monkeypatch.setattr(targets, "load", load_slow)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def no_race_runs() -> bool:
    return not any(thread.name.startswith("flashmap") for thread in threading.enumerate())


def answer(target: Path, prompt: str, tokens: int) -> str:
    """What plain greedy decoding writes, as the page shows it (the target writes random bytes)."""
    model, tokenizer = targets.load(target, dtype=torch.float32)
    inputs = encode(model, tokenizer, prompt)
    generate: Any = model.generate
    found = generate(**inputs, do_sample=False, max_new_tokens=tokens)[0, inputs["input_ids"].shape[1] :]
    text = str(tokenizer.decode(found, skip_special_tokens=True))
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text).replace(
        "\x7f", "\u2421"
    )


@pytest.fixture
def taught(folders, monkeypatch) -> str:
    """A prompt whose answer the drafter knows; some of each block is spoilt."""
    prompt = "What comes next?"
    target, tokenizer = targets.load(folders[0], dtype=torch.float32)
    inputs = encode(target, tokenizer, prompt)
    text = target.generate(**inputs, do_sample=False, max_new_tokens=96)
    oracle = oracle_for(target, tokenizer=tokenizer)
    oracle.teach(target, text)
    monkeypatch.setattr(drafters, "load", lambda *_, **__: oracle)
    return prompt

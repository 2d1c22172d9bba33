"""A visitor's race from click to end: in line, on tiny models from folders; whatever happens, its thread ends."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_files import write_drafter, write_target

from flashmap_hf import drafters, targets
from flashmap_hf.demo import job as module
from flashmap_hf.demo.controls import Controls
from flashmap_hf.demo.job import Job, Line, explain
from flashmap_hf.demo.shelf import Shelf

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {"target": str(write_target(root / "target")), "drafter": str(write_drafter(root / "drafter"))}


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    """The models are loaded once for all tests here."""
    return Shelf(torch.float32, CPU)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    deadline = time.monotonic() + 20
    while any(thread.name.startswith("flashmap") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)


def controls(names: dict[str, str], **options: Any) -> Controls:
    return Controls("Hi", **(names | {"max_new_tokens": 12} | options))


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_race_runs_to_its_end(names, shelf):
    job = Job(controls(names), shelf, Line())
    looks = sum(1 for _ in job.watch())
    assert looks >= 1
    assert (job.phase, job.complaint, job.stopped, job.difference) == ("done", None, False, None)
    assert job.race is not None
    assert len(job.race.plain.tokens) == len(job.race.flashmap.tokens) == 12
    assert job.race.plain.tokens == job.race.flashmap.tokens


def test_the_pair_stays_loaded_until_another_is_asked_for(names, shelf, monkeypatch, tmp_path):
    first = shelf.get(controls(names))
    assert shelf.get(controls(names, temperature=1.0)) is first
    monkeypatch.setattr(targets, "load", lambda *_, **__: pytest.fail("loaded again"))
    assert shelf.holds(controls(names))
    assert shelf.size > 0
    other = {**names, "drafter": str(tmp_path / "other")}
    assert not shelf.holds(controls(other))


def test_jobs_wait_for_one_another(names, shelf):
    line = Line()
    with line.joined():
        job = Job(controls(names), shelf, line)
        until(lambda: job.ahead == 1)
        assert job.phase == "waiting" and job.race is None
    assert [*job.watch()]
    assert job.complaint is None and job.race is not None
    assert line.tickets == []


def test_a_stop_while_waiting_ends_the_job(names, shelf):
    line = Line()
    with line.joined():
        job = Job(controls(names), shelf, line)
        job.stop.set()
        assert [*job.watch()]
        assert job.stopped and job.race is None and job.complaint is None


def test_first_come_first_served():
    line, order = Line(), []

    def visitor(name: int) -> None:
        with line.joined() as ahead:
            entered.append(name)
            while ahead():
                time.sleep(0.005)
            order.append(name)

    entered: list[int] = []
    threads = []
    with line.joined():
        for name in range(4):
            threads.append(threading.Thread(target=visitor, args=(name,)))
            threads[-1].start()
            until(lambda name=name: name in entered)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["stop", "the watcher leaves", "nobody looks"])
def test_a_race_in_the_middle_ends(names, shelf, monkeypatch, how):
    target = shelf.get(controls(names)).target
    handle = target.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    if how == "nobody looks":
        monkeypatch.setattr(module, "PATIENCE", 0.5)
    try:
        job = Job(controls(names, max_new_tokens=400), shelf, Line())
        if how == "nobody looks":
            until(job.future.done)
        else:
            watcher = job.watch()
            until(lambda: next(watcher, True) or (job.race and len(job.race.plain.commits) > 2))
            if how == "stop":
                job.stop.set()
                assert [*watcher]
            else:
                watcher.close()  # what the server does with a closed tab's generator
            until(job.future.done)
    finally:
        handle.remove()
    assert job.stopped and job.complaint is None
    assert job.race is None or len(job.race.plain.tokens) < 400


def test_an_exception_in_the_worker_is_a_message(names, shelf, caplog):
    target = shelf.get(controls(names)).target

    def fail(*_: Any) -> None:
        raise RuntimeError("the cable\nfell out")

    handle = target.register_forward_pre_hook(fail)
    try:
        job = Job(controls(names), shelf, Line())
        assert [*job.watch()]
    finally:
        handle.remove()
    assert job.complaint == "The race failed (RuntimeError: the cable fell out); the log of the server says where."
    assert "Traceback" not in job.complaint
    assert "the cable" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter": "nobody/nothing"}, "nobody/nothing"),
        ({"drafter": "not an id"}, "not an id"),
        ({"target": "nope"}, "'nope'"),
        ({"max_new_tokens": 600}, "ask for at most"),
    ],
)
def test_bad_choices_are_one_sentence(names, change, message):
    job = Job(controls(names, **change), Shelf(torch.float32, CPU), Line())
    assert [*job.watch()]
    assert job.complaint is not None
    assert message in job.complaint
    assert "\n" not in job.complaint


def test_a_drafter_for_another_target_is_refused(names, tmp_path):
    other = str(write_target(tmp_path / "other", hidden_size=16, num_attention_heads=2, num_key_value_heads=1))
    job = Job(controls(names, target=other), Shelf(torch.float32, CPU), Line())
    assert [*job.watch()]
    assert "use a drafter trained for it" in str(job.complaint)


def test_models_that_do_not_fit_are_not_loaded(names, monkeypatch):
    monkeypatch.setattr("flashmap_hf.demo.shelf.free_bytes", lambda _: 1000)
    monkeypatch.setattr(targets, "load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(drafters, "load", lambda *_, **__: pytest.fail("loaded"))
    job = Job(controls(names), Shelf(torch.float32, CPU), Line())
    assert [*job.watch()]
    assert "are free: choose a smaller target" in str(job.complaint)


def test_out_of_memory_says_what_to_do():
    assert "choose a smaller target" in explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert explain(OSError("cannot\nread it")) == "Cannot read it"


def test_a_repository_path_is_no_part_of_the_message(names):
    """The page may be public: what it says about a folder is what the visitor typed."""
    job = Job(controls(names, drafter="./nowhere"), Shelf(torch.float32, CPU), Line())
    assert [*job.watch()]
    assert str(Path.cwd()) not in str(job.complaint)

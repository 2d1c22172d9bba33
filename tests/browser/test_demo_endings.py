"""The demo in a real browser: however a race ends, the page says so and no thread stays; tabs and texts stay apart."""

from typing import Any

import pytest
from scripted_target import write_scripted
from stage import answer, no_race_runs, until
from tiny_files import byte_tokenizer

from flashmap_hf import targets

pytest_plugins = ("stage",)

PAYLOAD = (
    "<style>*{display:none}</style><img src=x onerror=\"window.pwned='img'\"><script>window.pwned=1</script>"
    "<a href=\"javascript:window.pwned='a'\">a</a> <think>hm</think>\n```html\n<b>x</b>\n```\n"
    "${window.pwned='js'} {{7*7}} `t` &lt;i&gt; </span></div><h1>out</h1>"
)
HOSTILE_PROMPT = "<img src=x onerror=window.pwned=2> ${1+1}"


@pytest.mark.usefixtures("slow")
def test_stop_in_the_middle_and_run_again(serve, tab, folders):
    demo = serve(*folders)
    tab.open(demo.url)
    tab.settings()
    tab.fill("#settings input[type=number]", "400")
    tab.run()
    tab.wait(lambda: len(tab.text("#text-plain .fm-text")) > 3)
    tab.shot("running-1280-light")
    tab.click("#stop")
    said = tab.finished()
    assert said.startswith("Stopped after ")
    assert "identical" in tab.text(".fm-card:last-child")
    until(no_race_runs)
    tab.fill("#settings input[type=number]", "5")
    tab.run()
    assert not tab.finished().startswith("Stopped")
    assert "5 of 5" in tab.text("#pane-plain")


@pytest.mark.usefixtures("slow")
def test_a_closed_tab_ends_its_race(serve, tab, folders):
    demo = serve(*folders)
    tab.open(demo.url)
    tab.settings()
    tab.fill("#settings input[type=number]", "400")
    tab.run()
    tab.wait(lambda: len(tab.text("#text-plain .fm-text")) > 3)
    tab.driver.get("about:blank")
    until(no_race_runs)


def test_a_bad_drafter_is_one_sentence(serve, tab, folders):
    demo = serve(*folders)
    tab.open(demo.url)
    tab.settings()
    tab.fill_labelled("Drafter", "nobody/<img src=x onerror=window.pwned=3>")
    tab.run()
    said = tab.finished()
    assert said.startswith("Not possible.")
    assert "<img src=x onerror=window.pwned=3>" in said
    assert "Traceback" not in said
    assert tab.find(".fm-error").get_attribute("role") == "alert"
    tab.shot("bad-drafter-1280-light")
    tab.fill_labelled("Drafter", "nobody/nothing")
    tab.run()
    assert "nobody/nothing" in tab.finished()
    tab.fill_labelled("Drafter", str(folders[1]))
    tab.run()
    tab.finished()
    assert "identical" in tab.text(".fm-card:last-child")
    assert tab.driver.execute_script("return window.pwned") is None


def test_an_exception_in_the_worker_is_shown(serve, tab, folders, monkeypatch):
    load = targets.load

    def load_broken(*args: Any, **kwargs: Any) -> Any:
        target, tokenizer = load(*args, **kwargs)
        calls: list[int] = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) > 30:
                raise RuntimeError("the <b>cable</b> fell out")

        target.register_forward_pre_hook(fail)
        return target, tokenizer

    monkeypatch.setattr(targets, "load", load_broken)
    tab.open(serve(*folders).url)
    tab.run()
    assert "The race failed (RuntimeError: the <b>cable</b> fell out)" in tab.finished()
    until(no_race_runs)


@pytest.mark.usefixtures("slow")
def test_two_tabs_at_once_do_not_mix(serve, new_tab, folders):
    demo = serve(*folders)
    prompts = ("The first visitor asks", "Another one, at the same time")
    tabs = [new_tab().open(demo.url) for _ in prompts]
    for tab, prompt in zip(tabs, prompts, strict=True):
        tab.fill("#ask textarea", prompt)
    tabs[0].run()
    tabs[1].run()
    tabs[1].wait(lambda: "Waiting: 1 before you" in tabs[1].text(".fm-status"))
    tabs[1].shot("waiting-1280-light")
    for tab, prompt in zip(tabs, prompts, strict=True):
        tab.finished()
        expected = answer(folders[0], prompt, 96)
        assert tab.text("#text-plain .fm-text") == tab.text("#text-flashmap .fm-text") == expected
    assert tabs[0].text("#text-plain .fm-text") != tabs[1].text("#text-plain .fm-text")


# --- hostile text ---------------------------------------------------------------------------------------------------


def test_hostile_text_is_shown_and_inert(serve, tab, tmp_path):
    """The target writes HTML, script, templates and fences; the page shows them letter by letter."""
    demo = serve(*write_scripted(tmp_path, HOSTILE_PROMPT, PAYLOAD))
    tab.open(demo.url)
    tab.settings()
    tab.fill("#settings input[type=number]", str(len(byte_tokenizer()(PAYLOAD)["input_ids"]) + 1))
    tab.fill("#ask textarea", HOSTILE_PROMPT)
    tab.run()
    tab.finished()
    for name in ("plain", "flashmap"):
        assert tab.text(f"#text-{name} .fm-text") == PAYLOAD
        assert tab.count(f"#text-{name} .fm-text :not(span.fm-t)") == 0
        assert tab.find(f"#text-{name} .fm-text").is_displayed()
    assert tab.driver.execute_script("return window.pwned") is None
    assert tab.requests() == {"127.0.0.1"}
    tab.shot("hostile-1280-light")

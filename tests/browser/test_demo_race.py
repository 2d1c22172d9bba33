"""The demo in a real browser, on tiny models: a race as a visitor sees it, and that nothing leaves this machine."""

import time

import pytest
from selenium.webdriver.common.keys import Keys
from stage import answer, asked

pytest_plugins = ("stage",)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False), (400, True)])
def test_a_run_to_completion(serve, tab, folders, width, dark):
    demo = serve(*folders)
    tab.open(demo.url, width=width, dark=dark)
    name = f"{width}-{'dark' if dark else 'light'}"
    tab.shot(f"idle-{name}")
    tab.run()
    said = tab.finished()
    assert any(words in said for words in ("as fast as plain decoding", "slower here", "equally fast"))
    expected = answer(folders[0], tab.driver.find_element("css selector", "#ask textarea").get_attribute("value"), 96)
    assert tab.text("#text-plain .fm-text") == tab.text("#text-flashmap .fm-text") == expected
    assert "identical" in tab.text(".fm-card:last-child")
    assert tab.count("#text-flashmap .fm-t[title]") > 0
    assert "Acceptance by position" in tab.text("#report")
    assert "Timeline" in tab.text("#report")
    assert tab.find("#report svg").get_attribute("aria-label").startswith("Plain: 96 tokens")
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert tab.driver.execute_script(overflow) <= 0
    tab.shot(f"done-{name}")
    tab.settings()
    tab.shot(f"settings-{name}")
    assert tab.complaints() == []


def test_nothing_outside_this_machine_is_asked(serve, tab, folders):
    asked.clear()
    demo = serve(*folders)
    tab.open(demo.url)
    tab.run()
    tab.finished()
    tab.settings()
    tab.click("#check")
    time.sleep(1)
    assert tab.requests() == {"127.0.0.1"}
    assert asked <= {"127.0.0.1", "localhost", "::1", "0.0.0.0"}


def test_it_can_be_used_by_keyboard(serve, tab, folders):
    demo = serve(*folders)
    tab.open(demo.url)
    prompt = tab.find("#ask textarea")
    prompt.click()
    prompt.send_keys(" and more")
    prompt.send_keys(Keys.SHIFT, Keys.ENTER)
    tab.wait(lambda: "Choose an example" not in tab.text(".fm-status"))
    tab.finished()
    reached, active = [], tab.driver.switch_to
    for _ in range(24):
        active.active_element.send_keys(Keys.TAB)
        element = active.active_element
        reached.append(element.get_attribute("aria-label") or element.text or element.get_attribute("id"))
        if len(reached) == 1:
            outline = tab.driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", element)
            assert outline != "none"
    assert reached[:2] == ["Run", "Stop"]
    assert "Weekend" in reached and "Plain text" in reached and "FlashMap text" in reached


def test_an_example_fills_the_prompt(serve, tab, folders):
    tab.open(serve(*folders).url)
    button = next(b for b in tab.driver.find_elements("css selector", "#examples button") if b.text == "Fences")
    button.click()
    tab.wait(lambda: "How many metres of fence" in tab.find("#ask textarea").get_attribute("value"))


def test_drafts_have_colours_titles_and_on_demand_numbers(serve, tab, folders, taught):
    """For whoever cannot tell the colours apart; the text itself stays as it is."""
    tab.open(serve(*folders).url)
    tab.fill("#ask textarea", taught)
    tab.settings()
    tab.click("#how label")  # not adaptive: every step drafts K tokens
    tab.run()
    tab.finished()
    assert tab.count("#report tbody tr") == 5
    draft = tab.find('#text-flashmap .fm-t[data-k="2"]')
    assert draft.get_attribute("title").endswith("draft, position 2, accepted")
    assert draft.value_of_css_property("background-color") not in ("rgba(0, 0, 0, 0)", "transparent")
    before = tab.text("#text-flashmap .fm-text")
    shown = "return getComputedStyle(document.querySelector('.fm-t[data-k]'), '::before').content"
    assert tab.driver.execute_script(shown) == "none"
    tab.click("#numbers input")
    tab.wait(lambda: tab.driver.execute_script(shown) not in ("none", "normal"))
    assert tab.text("#text-flashmap .fm-text") == before
    tab.shot("numbered-1280-light")

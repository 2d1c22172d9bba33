"""The HTML of the page: model text is inert in it, origins are told in words, numbers are those of the race."""

from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_files import byte_tokenizer

from flashmap_hf.demo import charts, panes
from flashmap_hf.demo.figures import Figures, figures, sameness, verdict
from flashmap_hf.demo.panes import Transcript, escape
from flashmap_hf.demo.pieces import Pieces
from flashmap_hf.demo.race import Commit

HOSTILE = [
    "<style>body{display:none}</style>",
    '<img src=x onerror="window.pwned=1">',
    "<script>window.pwned=1</script>",
    "<a href='javascript:window.pwned=1'>link</a>",
    "<think>secret</think>",
    "```html\n<b>bold</b>\n```",
    "${window.pwned=1} {{7*7}} `tick` {{#each value}}",
    "&lt;b&gt; &amp; \"quotes\" 'single'",
    "</span></div><h1>out</h1><!-- comment --> <![CDATA[x]]>",
]


class Reader(HTMLParser):
    """The elements of a piece of HTML and its text, as a browser would find them."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def side(*steps: tuple[str, int]) -> Any:
    """A finished side that wrote these texts, byte by byte, so many tokens of each accepted drafts."""
    tokenizer = byte_tokenizer()
    commits = [
        Commit(tuple(tokenizer(text)["input_ids"]), accepted, seconds=float(i))
        for i, (text, accepted) in enumerate(steps, start=1)
    ]
    stats = SimpleNamespace(accepted_by_position=[2, 1], drafted_by_position=[4, 3], plain_calls=0)
    return SimpleNamespace(commits=commits, finished=True, stats=stats)


def transcript(found: Any, coloured: bool = True) -> Transcript:
    return Transcript(found, Pieces(byte_tokenizer()), coloured)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("coloured", [True, False])
def test_model_text_is_shown_and_nothing_more(text, coloured):
    found = Reader(transcript(side((text, 1)), coloured).update())
    assert found.text == text
    assert {tag for tag, _ in found.elements} <= {"span"}
    assert {name for _, attributes in found.elements for name in attributes} <= {"class", "title", "data-k"}


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped_text_has_no_sign_that_a_template_knows(text):
    assert not set("<>\"'${}`") & set(escape(text))
    assert Reader(f'<i title="{escape(text)}"></i>').elements == [("i", {"title": text})]


def test_signs_that_a_browser_would_drop_are_pictures():
    assert escape("a\0b\x1b[1mc\r\n\td") == "a\u2400b\u241b[1mc\u240d\n\td"


def test_each_token_tells_its_origin_in_words():
    found = Reader(transcript(side(("x", 0), ("abc", 2))).update())
    titles = [attributes["title"] for _, attributes in found.elements]
    assert titles == [
        "Token 1: the target's own",
        "Token 2: draft, position 1, accepted",
        "Token 3: draft, position 2, accepted",
        "Token 4: the target's own",
    ]
    assert [attributes.get("data-k") for _, attributes in found.elements] == [None, "1", "2", None]
    assert "fm-k1" in found.elements[1][1]["class"]


def test_a_transcript_only_grows():
    found = side(("one ", 0), ("two ", 3), ("thré", 2))
    commits, found.commits, found.finished = found.commits, [], False
    shown = transcript(found)
    texts = [shown.update()]
    for commit in commits:
        found.commits.append(commit)
        texts.append(shown.update())
    found.finished = True
    texts += [shown.update(), shown.update()]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == texts[-2]
    assert Reader(texts[-1]).text == "one two thré"


def test_positions_beyond_the_colours_share_the_last_one():
    assert "fm-k8" in transcript(side(("a" * 12, 11))).update()
    assert "fm-k9" not in transcript(side(("a" * 12, 11))).update()
    assert "position 11" in transcript(side(("a" * 12, 11))).update()


def test_the_legend_says_it_in_words():
    text = Reader(panes.legend()).text
    assert "accepted draft, position 1" in text and "accepted draft, position 8" in text
    assert "and later" in text
    assert "the target's own token (dotted line)" in text


# --- numbers --------------------------------------------------------------------------------------------------------


def race(plain: Any, flashmap: Any) -> Any:
    return SimpleNamespace(plain=plain, flashmap=flashmap)


def two_sides() -> Any:
    """Plain: 4 tokens in 4 s. FlashMap: 4 tokens in 2 s, of which 0.2 s in the drafter and 0.6 s in the target."""
    plain = side(*(("abcd"[i], 0) for i in range(4)))
    flashmap = side(("a", 0), ("bcd", 2))
    flashmap.commits[1] = Commit(flashmap.commits[1].tokens, 2, 2.0, seconds_drafter=0.2, seconds_target=0.6, blocks=1)
    return race(plain, flashmap)


def job(found: Any, phase: str = "done", **changes: Any) -> Any:
    controls = SimpleNamespace(temperature=0.0, max_new_tokens=4)
    pair = SimpleNamespace(target=SimpleNamespace(dtype="torch.float32"), template_differs=False)
    stop = SimpleNamespace(is_set=lambda: False)
    values = {
        "race": found, "phase": phase, "controls": controls, "pair": pair, "difference": None, "stopped": False,
        "complaint": None, "ahead": 0, "stop": stop,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def test_the_numbers_of_a_race():
    found = figures(two_sides())
    assert (found.plain.tokens_per_second, found.flashmap.tokens_per_second) == (1.0, 2.0)
    assert found.speedup == 2.0
    assert found.tokens_per_step == 2.0
    assert (found.drafter_ms, found.target_ms) == (pytest.approx(200), pytest.approx(600))
    assert (found.step_cost, found.step_yield) == (1.0, 3.0)
    assert (found.accepted, found.identical, found.compared) == (2, 4, 4)


def test_before_the_first_step_there_are_dashes():
    empty = race(side(), side())
    found = figures(empty)
    assert found.speedup is None
    assert Reader(panes.scoreboard(job(empty, "racing"), found)).text.count(panes.DASH) >= 7
    assert Reader(panes.scoreboard(None, None)).text.count(panes.DASH) >= 7
    assert charts.report(empty) == ""


def test_two_prefills_compare_nothing():
    assert verdict(figures(race(side(("a", 0)), side(("a", 0))))) == "Too few tokens to compare the two."


def numbers(speedup: float) -> Figures:
    found = figures(two_sides())
    return Figures(**(vars(found) | {"speedup": speedup, "step_cost": 2.0, "step_yield": 1.5}))


def test_the_verdict_is_honest():
    slow = verdict(numbers(0.75))
    assert "slower here: 0.75 times the speed" in slow
    assert "costs 2.00 plain steps and yields 1.50 tokens" in slow
    assert "2.00 times as fast" in verdict(numbers(2.0))
    assert "equally fast" in verdict(numbers(1.0))
    assert "fm-card fm-" not in panes.scoreboard(None, numbers(1.0))
    board = panes.scoreboard(job(two_sides()), numbers(0.75))
    assert "0.75×" in board and "slower here" in board and "fm-card fm-bad" in board


@pytest.mark.parametrize(
    ("phase", "changes", "word", "sentence"),
    [
        ("racing", {}, "identical", "The first 4 tokens are the same on both sides so far, in float32."),
        ("done", {}, "identical", "The first 4 tokens are the same on both sides, in float32."),
        ("done", {"stopped": True}, "identical", "so far"),
        ("done", {"controls": SimpleNamespace(temperature=0.7)}, "by law", "both sides draw from the target's own law"),
    ],
)
def test_what_is_said_about_the_outputs(phase, changes, word, sentence):
    found = two_sides()
    said = sameness(job(found, phase, **changes), figures(found))
    assert said[0] == word
    assert sentence in said[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_difference_is_told_with_its_margin(dtype):
    found = race(side(("ab", 0), ("c", 0)), side(("aX", 0), ("c", 0)))
    pair = SimpleNamespace(target=SimpleNamespace(dtype=f"torch.{dtype}"), template_differs=False)
    difference = SimpleNamespace(margin=0.0123)
    word, sentence = sameness(job(found, pair=pair, difference=difference), figures(found))
    assert word == "differ"
    assert sentence.startswith("The outputs part at token 2. There the target's two best tokens are 0.012 apart")
    assert ("please report it" in sentence) == (dtype == "float32")


def test_the_status_line():
    found = two_sides()
    assert "press Run" in panes.status(None, None)
    assert "Waiting: 2 before you" in panes.status(job(None, "waiting", ahead=2), None)
    assert 'role="alert"' in panes.status(job(found, complaint="<b>no</b>"), None)
    assert "<b>no" not in panes.status(job(found, complaint="<b>no</b>"), None)
    assert "Stopped before the race began" in panes.status(job(None), None)
    assert "Stopped after 4 and 4 tokens." in panes.status(job(found, stopped=True), figures(found))
    found.flashmap.stats.plain_calls = 1
    assert "decoded plainly" in panes.status(job(found), figures(found))


# --- charts ---------------------------------------------------------------------------------------------------------


def test_the_charts_hold_the_counts():
    report = charts.report(two_sides())
    text = Reader(report).text
    assert "50 % 2 of 4" in text and "33 % 1 of 3" in text
    assert "Plain: 4 tokens in 4.0 s and 4 steps. FlashMap: 4 tokens in 2.0 s and 2 steps." in text
    steps = [attributes["class"] for tag, attributes in Reader(report).elements if tag == "rect"]
    assert steps == ["fm-step fm-none"] * 4 + ["fm-step fm-none", "fm-step fm-k2"]


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(4, [0, 1, 2, 3, 4]), (96, [0, 20, 40, 60, 80]), (0.3, [0, 0.1, 0.2, 0.3]), (1024, [0, 500, 1000])],
)
def test_ticks_are_round_and_few(largest, expected):
    assert charts.ticks(largest) == pytest.approx(expected)

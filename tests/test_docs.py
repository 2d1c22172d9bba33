"""The documentation: complete, built without a warning or a request to elsewhere, and true where a test can tell."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from fractions import Fraction
from html.parser import HTMLParser
from itertools import permutations, product
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
LINK = re.compile(r"\]\((?!https?:|mailto:)(?P<place>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "flashmap_hf").rglob("*.py")))
# A literal that goes on in the next line of the source is one text.
SOURCE_TEXT = re.sub(r'"\n\s*f?"', "", SOURCES)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """The ids that GitHub and mkdocs give to the headings of a page."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


# --- pages and links ------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = [page for entry in config["nav"] for page in entry.values()]
    assert sorted(named) == [path.name for path in PAGES]


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_local_links_lead_somewhere(path: Path) -> None:
    links = list(LINK.finditer(FENCE.sub("", path.read_text(encoding="utf-8"))))
    for link in links:
        place = (path.parent / link["place"]) if link["place"] else path
        assert place.exists(), link[0]
        if link["anchor"]:
            assert link["anchor"] in anchors(place), link[0]


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_python_blocks_are_python(path: Path) -> None:
    for block in FENCE.finditer(path.read_text(encoding="utf-8")):
        if block["language"] == "python":
            ast.parse(block["body"])


def test_named_scripts_and_modules_exist() -> None:
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"\b(?:examples|tests|docs|hub_cards)/[\w./-]*\w\.(?:py|sh|md|svg|ipynb|json)\b", text):
            assert (ROOT / name).exists(), f"{relative(path)}: {name}"
        for module in re.findall(r"python -m (flashmap_hf[\w.]*)", text):
            where = ROOT / module.replace(".", "/")
            assert where.with_suffix(".py").exists() or (where / "__main__.py").exists(), f"{relative(path)}: {module}"


# --- the site -------------------------------------------------------------------------------------------------------


class Requests(HTMLParser):
    """What a browser fetches by itself when it shows a page; links are followed by a person only."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag != "a":
            self.places += [
                values[name] or "" for name in ("src", "srcset", "data", "href", "poster") if name in values
            ]


def test_the_site_builds_without_a_warning_and_asks_nobody_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        requests = Requests()
        requests.feed(text)
        assert not [place for place in requests.places if re.match(r"(?:https?:)?//", place)], page
        assert "$<code>" not in text and "<!-- options:" not in text, page  # formulas and tables are in place
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert "--transition-rank" in api and "rank of the bias from the previously drafted token" in api
    assert (tmp_path / "site" / "method" / "index.html").read_text(encoding="utf-8").count("<math") > 50


def test_make_docs_builds_strictly() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^docs: \$\(STAMP\).*\n\t.*mkdocs build --strict", makefile, flags=re.MULTILINE)


def test_the_picture_is_self_contained_and_has_a_ground_of_its_own() -> None:
    """Shown as an image it gets no style from the page: it must not rely on the page's colour."""
    picture = (DOCS / "images" / "how-it-works.svg").read_text(encoding="utf-8")
    assert "<title" in picture and "<desc" in picture
    assert not re.search(r"<script|<image|href=", picture)
    first = re.search(r"<rect [^>]*>", picture)
    assert first is not None and 'fill="#f1f5f9"' in first[0]


# --- what the texts claim -------------------------------------------------------------------------------------------


def test_the_messages_in_troubleshooting_are_those_of_the_package() -> None:
    table = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").split("## Messages")[1]
    messages = re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)
    assert len(messages) > 10
    assert [message for message in messages if message not in SOURCE_TEXT] == []


def test_the_options_in_the_readme_are_options() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| option | what")[1].split("\n\n")[0]
    options = re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)
    assert len(options) >= 4
    assert [name for name in options if f"    {name}: " not in SOURCES] == []


def test_the_citation_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"version = {{{version}}}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_redrawing_the_noise_behind_a_rejection_biases_as_the_method_page_says() -> None:
    """Two equal tokens everywhere; the drafter is right at position 1 if and only if the noise of position 2 is low."""
    half = Fraction(1, 2)
    kept = redrawn = Fraction(0)
    for low, low_again in product((True, False), repeat=2):  # u_2 < 1/2, and the number drawn in its place
        accepted = low
        kept += half * half * low  # the upper half's token follows: with the number that the draft has seen
        redrawn += half * half * (low if accepted else low_again)
    assert (redrawn, kept) == (Fraction(3, 4), half)
    assert r"= \tfrac34" in (DOCS / "method.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("p", [(4, 3, 2, 1), (1, 1, 1, 1), (9, 1, 0, 0)])
def test_trying_certain_children_in_turn_is_one_draw(p: tuple[int, ...]) -> None:
    """The last proof of the method page, in exact fractions: every child list, every order."""
    law = [Fraction(mass, sum(p)) for mass in p]
    for count in range(len(law) + 1):
        for children in permutations(range(len(law)), count):
            rest, reached = list(law), Fraction(1)
            emitted = [Fraction(0)] * len(law)
            for child in children:
                emitted[child] += reached * rest[child]
                reached *= 1 - rest[child]
                left = [mass if token != child else Fraction(0) for token, mass in enumerate(rest)]
                total = sum(left)
                rest = [mass / total for mass in left] if total else rest  # no mass left: nothing gets here
            emitted = [so_far + reached * mass for so_far, mass in zip(emitted, rest, strict=True)]
            assert emitted == law


# --- the README's own lines -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_readmes_example_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """On the real target, from a folder that holds what a clone holds."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = next(block["body"] for block in FENCE.finditer(text) if block["language"] == "python")
    assert len([line for line in first.splitlines() if line]) <= 10
    shutil.copytree(ROOT / "hub_cards" / "flashmap-smollm2-135m", tmp_path / "hub_cards" / "flashmap-smollm2-135m")
    script = tmp_path / "example.py"
    script.write_text(first.replace("max_new_tokens=96", "max_new_tokens=8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    assert capsys.readouterr().out.strip()

"""The package's outer side: metadata, commands, licence, citation, and that CI runs what the README says."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import flashmap_hf

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Subpackages that a user installs an extra for.
EXTRAS_OF = {"training": ("train", "datasets"), "evaluation": ("train",), "demo": ("demo",)}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, flags=re.MULTILINE))


def script_commands(path: Path) -> list[str]:
    """The lines of a shell script without comments and indentation."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def dry_run(*arguments: str) -> list[str]:
    """The commands that `make` would run; settings of an outer `make` or shell are kept out."""
    kept_out = {"TORCH", "PYTHON", "VENV", "ARGS", "EXTRAS", "WORKERS", "THREADS", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    finished = subprocess.run(
        ["make", "--no-print-directory", "-n", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in kept_out},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


# --- metadata -------------------------------------------------------------------------------------------------------


def test_one_version_everywhere():
    declared = PROJECT["version"]
    assert flashmap_hf.__version__ == declared
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == declared
    assert f"## [{declared}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_console_script_can_be_called():
    assert PROJECT["scripts"] == {"flashmap": "flashmap_hf.cli:main"}
    assert callable(resolve_name(PROJECT["scripts"]["flashmap"]))


def test_types_are_shipped():
    assert (Path(flashmap_hf.__file__).parent / "py.typed").is_file()


def test_this_environment_is_in_the_declared_ranges():
    for requirement in map(Requirement, PROJECT["dependencies"]):
        installed = version(requirement.name)
        assert requirement.specifier.contains(installed, prereleases=True), f"{requirement} but {installed}"


def third_party_imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"flashmap_hf"}


@pytest.mark.parametrize("path", sorted((ROOT / "flashmap_hf").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_import_is_a_declared_dependency(path):
    distributions = packages_distributions()
    subpackage = path.relative_to(ROOT / "flashmap_hf").parts[0]
    extras = [line for extra in EXTRAS_OF.get(subpackage, ()) for line in PROJECT["optional-dependencies"][extra]]
    declared = PROJECT["dependencies"] + extras
    allowed = {canonicalize_name(Requirement(line).name) for line in declared}
    for name in third_party_imports(path):
        providers = {canonicalize_name(distribution) for distribution in distributions.get(name, [name])}
        assert providers & allowed, f"{name} is imported but neither a dependency nor in the extra"


# --- licence and citation -------------------------------------------------------------------------------------------


def test_licence_is_the_whole_apache_licence():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert re.findall(r"^ {3}(\d)\. ", text, flags=re.MULTILINE) == list("123456789")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_citation_credits_the_source_of_the_method():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["title"] == "FlashMap for Hugging Face"
    assert citation["license"] == PROJECT["license"]
    (source,) = citation["references"]
    assert source["title"] == "FlashMap: Flow Map Speculative Decoding and the Mathematical Elimination of Suffix Decay"
    assert source["authors"] == [{"family-names": "Akhunji", "given-names": "Abrar"}]


# --- commands -------------------------------------------------------------------------------------------------------


def test_ci_runs_the_readme_commands():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = script_commands(script)
    assert "set -euo pipefail" in commands
    assert commands[-3:] == ["make quality", "make test", "make test-browser"]
    checked = subprocess.run([shutil.which("bash"), "-n", script], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_the_workflow_runs_the_same_script():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    supported = SpecifierSet(PROJECT["requires-python"])
    assert "3.11" in job["strategy"]["matrix"]["python"]
    assert all(python in supported for python in job["strategy"]["matrix"]["python"])


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documented_commands_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    # In code only: `make demo`, or a line of a fenced block.
    named = set(re.findall(r"(?:`|^\s*(?:\$ )?)make ([a-z][a-z-]*)", text, flags=re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= make_targets()


def test_make_sets_itself_up(tmp_path):
    """On a machine with nothing: environment, torch, package, then the command; torch first, so that pip keeps it."""
    fresh = f"VENV={tmp_path / 'env'}"
    steps = "\n".join(dry_run("demo", fresh, "ARGS=--dtype float32"))
    order = ["-m venv", "pip install -q torch==", 'pip install -q -e ".[', "examples/demo.py --dtype float32"]
    positions = [steps.index(step) for step in order]
    assert positions == sorted(positions)
    assert '-m "not slow"' in dry_run("test", fresh)[-1]
    assert "not slow" not in dry_run("test-all", fresh)[-1]


def test_make_lets_the_choice_of_torch_be_changed(tmp_path):
    fresh = f"VENV={tmp_path / 'env'}"
    assert any(
        "pip install -q torch==9 --no-deps" in step for step in dry_run("test", fresh, "TORCH=torch==9 --no-deps")
    )
    assert [step.split("pip install")[1] for step in dry_run("test", fresh, "TORCH=") if "pip install" in step] == [
        ' -q -e ".[dev,train,demo,browser]"'
    ]


def test_make_refuses_an_old_python(tmp_path):
    old = tmp_path / "old-python"
    pretend = "import sys; sys.version_info = (3, 9, 0); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{pretend}" "$@"\n', encoding="utf-8")
    old.chmod(0o755)
    finished = subprocess.run(
        ["make", "install", f"PYTHON={old}", f"VENV={tmp_path / 'env'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode != 0
    assert "Python 3.11 or newer is needed" in finished.stderr
    assert not (tmp_path / "env").exists()

"""The law of imports: hidden states -> context -> flow -> head -> candidates -> verification -> generate, one way."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flashmap_hf"

# Lowest first. A module imports only from layers strictly below its own. A name that ends in ".*" is a subpackage: its
# modules may also import one another, without a cycle. Planned modules stand here before they exist.
LAYERS: tuple[tuple[str, ...], ...] = (
    # These import nothing of ours.
    ("verification", "flow", "provenance", "targets", "fingerprints", "statistics", "markdown", "few_rows"),
    ("tree", "ngrams", "costs"),
    ("sampled_tree",),
    ("devices", "prompts", "prompt_files", "options", "progress", "pace", "target_outline"),
    ("configuration_flashmap", "generation_config", "hub_errors"),
    ("conditioning", "velocity", "head", "compatibility", "loading", "sharing"),
    ("modeling_flashmap",),
    ("candidates", "row_processors", "target_steps", "compiling"),
    ("emission", "proposals"),
    ("collected",),
    ("decoding",),
    ("doors",),
    ("hook",),
    ("__init__",),  # the public names; from here upwards `import flashmap_hf` is allowed
    ("drafters", "runs"),
    ("compare",),
    ("comparison_table",),
    ("evaluation.*",),
    ("training.*",),
    ("card_sections", "recipe_card"),
    ("hub_card",),
    ("hub_push", "hub_list"),
    ("demo.*",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# Where `generate` is patched, and nowhere else.
HOOK = "hook"
# What reads the package as a user does.
PUBLIC_READERS = [
    path
    for path in (ROOT / PACKAGE / "cli.py", ROOT / "app.py", *sorted((ROOT / "examples").glob("*.py")))
    if path.exists()
]
# Each of these is either wanted by one command only or slow to import.
HEAVY = ("gradio", "matplotlib", "accelerate", "datasets", "pandas", "scipy", "sklearn")


def module_name(path: Path, root: Path) -> str:
    """`flashmap_hf/training/losses.py` -> `training.losses`; a package's own file is its `__init__`."""
    return ".".join(path.relative_to(root / PACKAGE).with_suffix("").parts)


def package_modules(root: Path = ROOT) -> dict[str, Path]:
    return {module_name(path, root): path for path in sorted((root / PACKAGE).rglob("*.py"))}


def layer_name(module: str) -> str:
    """The name under which the table knows a module."""
    return f"{module.split('.')[0]}.*" if "." in module else module


def own_imports(module: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Our modules that `module` imports, anywhere in the file, type-checking and function bodies included."""
    package = [PACKAGE, *module.split(".")[:-1]]  # what a relative import starts from

    def resolve(dotted: str) -> str | None:
        inside = dotted.removeprefix(PACKAGE).lstrip(".")
        for name in (inside, f"{inside}.__init__".lstrip(".")):
            if name in modules:
                return name
        return None

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield resolve(alias.name) or alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            if origin.split(".")[0] == PACKAGE:
                for alias in node.names:
                    yield resolve(f"{origin}.{alias.name}") or resolve(origin) or origin


def violations(root: Path = ROOT) -> list[str]:
    """Every break of the law, as sentences."""
    modules = package_modules(root)
    found = []
    siblings: dict[str, set[str]] = {}
    for module, path in modules.items():
        if layer_name(module) not in RANK:
            found.append(f"{module}: not in the table of layers; add it to LAYERS in tests/test_imports.py")
            continue
        for imported in own_imports(module, path, modules):
            if imported not in modules:
                found.append(f"{module} imports {imported}, which does not exist")
            elif "." in module and layer_name(module) == layer_name(imported):
                siblings.setdefault(module, set()).add(imported)
            elif RANK.get(layer_name(imported), -1) >= RANK[layer_name(module)]:
                found.append(f"{module} imports {imported}, which is not below it")
    try:
        TopologicalSorter(siblings).prepare()
    except CycleError as error:
        found.append("import cycle: " + " -> ".join(error.args[1]))
    return found


def test_imports_go_one_way():
    assert violations() == []


def test_every_layer_below_the_model_is_there():
    """The table speaks of real files: a renamed module must not slip out of the law."""
    assert {"verification", "flow", "conditioning", "head", "modeling_flashmap", "candidates", "hook"} <= set(
        package_modules()
    )


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("flow", "from .head import DraftHead", "flow imports head"),
        ("flow", "def f():\n    import flashmap_hf.head", "flow imports head"),
        ("verification", "from . import flow", "verification imports flow"),
        ("head", "from flashmap_hf import hook", "head imports hook"),
        ("head", "from flashmap_hf import FlashMapConfig", "head imports __init__"),
        ("modeling_flashmap", "from .training.losses import loss", "modeling_flashmap imports training.losses"),
        ("candidates", "import flashmap_hf.missing", "which does not exist"),
        ("training.losses", "from .trainer import train", "import cycle"),
        ("training.losses", "from ..cli import main", "training.losses imports cli"),
        ("utils", "", "utils: not in the table"),
    ],
)
def test_the_law_sees_a_break(tmp_path, module, source, expected):
    files = {
        "__init__": "from .hook import install",
        "flow": "",
        "verification": "",
        "head": "from .flow import euler",
        "modeling_flashmap": "from . import head",
        "candidates": "from .modeling_flashmap import FlashMapDrafter",
        "hook": "from .candidates import FlashMapCandidateGenerator",
        "training.__init__": "",
        "training.losses": "from ..flow import velocity",
        "training.trainer": "from .losses import loss",
        "cli": "import flashmap_hf",
    }

    def write(name: str, text: str) -> None:
        path = tmp_path.joinpath(PACKAGE, *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    for name, text in files.items():
        write(name, text)
    assert violations(tmp_path) == []
    write(module, source)
    (found,) = violations(tmp_path)
    assert expected in found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(source: str) -> list[str]:
    """Underscore names of other objects that a file imports or reaches for."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if any(is_private(part) for part in name.split("."))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found += [node.attr] if owner not in ("self", "cls") else []
    return found


@pytest.mark.parametrize("path", PUBLIC_READERS, ids=lambda path: path.name)
def test_commands_and_examples_use_public_names(path):
    assert private_uses(path.read_text(encoding="utf-8")) == []


def test_private_uses_are_seen():
    assert private_uses("from flashmap_hf._x import y\nfrom flashmap_hf import _z\nmodel._sample(); self._own") == [
        "flashmap_hf._x",
        "_z",
        "_sample",
    ]


def patched_names(source: str) -> list[str]:
    """Attributes that a file sets on names it imported from elsewhere: `GenerationMixin.generate = ...`, `setattr`."""
    tree = ast.parse(source)
    foreign = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }

    def root_name(node: ast.expr) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and root_name(target) in foreign:
                    found.append(ast.unparse(target))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and root_name(node.args[0]) in foreign:
            found.append(ast.unparse(node))
    return found


def test_only_the_hook_patches_another_library():
    patching = {name for name, path in package_modules().items() if patched_names(path.read_text(encoding="utf-8"))}
    assert patching <= {HOOK}


def test_a_patch_is_seen():
    source = "import torch\nfrom transformers import GenerationMixin as G\nG.generate = 1\nsetattr(torch.nn, 'x', 1)\n"
    assert patched_names(source) == ["G.generate", "setattr(torch.nn, 'x', 1)"]
    assert patched_names("import torch\nx = torch.nn.Linear(1, 1)\nx.bias = None") == []


@pytest.mark.parametrize("module", package_modules())
def test_nothing_unpickles_or_trusts_remote_code(module):
    tree = ast.parse(package_modules()[module].read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        assert ast.unparse(call.func) != "torch.load"
        trusted = [keyword for keyword in call.keywords if keyword.arg == "trust_remote_code"]
        assert all(ast.unparse(keyword.value) == "False" for keyword in trusted)


# --- what an import does, in an interpreter of its own --------------------------------------------------------------

PROBE = """
import importlib, json, os, random, sys
import numpy, torch
from transformers import AutoModelForCausalLM, GenerationMixin, GPT2Config, PreTrainedModel
from transformers.generation import candidate_generator

def state():
    return {
        "torch generator": torch.get_rng_state().tolist(),
        "random generator": hash(random.getstate()),
        "numpy generator": numpy.random.get_state()[1].tolist(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }

events = []
watched = {"socket.connect", "socket.getaddrinfo", "socket.bind", "subprocess.Popen", "os.system", "os.mkdir"}
sys.addaudithook(lambda event, args: events.append(f"{event} {args}") if event in watched else None)

torch.manual_seed(0)
config = dict(vocab_size=64, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=None, bos_token_id=None)
target = AutoModelForCausalLM.from_config(GPT2Config(**config)).eval()
small = AutoModelForCausalLM.from_config(GPT2Config(**config)).eval()
prompt = torch.arange(5)[None]

def texts():
    return [
        target.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0, assistant_model=small).tolist(),
        target.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0).tolist(),
    ]

stock = texts()
before, modules, events[:] = state(), set(sys.modules), []
import flashmap_hf
report = {"loaded": sorted(set(sys.modules) - modules), "events": list(events)}
after = state()
report["changed"] = [name for name in before if before[name] != after[name]]

hooked = dict(vars(GenerationMixin))
importlib.reload(flashmap_hf)
report["patched again"] = [name for name, value in vars(GenerationMixin).items() if hooked.get(name) is not value]
first = texts()

for name in [name for name in sys.modules if name.split(".")[0] == "flashmap_hf"]:
    del sys.modules[name]
import flashmap_hf
report["stock behaviour kept"] = stock == first == texts()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> dict:
    """One fresh interpreter that imports the package, reloads it and imports it anew."""
    finished = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def test_import_loads_nothing_heavy(probe):
    assert PACKAGE in probe["loaded"]
    assert {name.split(".")[0] for name in probe["loaded"]}.isdisjoint(HEAVY)


def test_import_touches_no_network_process_or_folder(probe):
    assert probe["events"] == []


def test_import_leaves_global_state_alone(probe):
    assert probe["changed"] == []


def test_second_import_is_harmless(probe):
    assert probe["patched again"] == []
    assert probe["stock behaviour kept"]

"""The table of methods: each is a way to call `generate` on the same target, and what it asks for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.models.auto import AutoModelForCausalLM, AutoTokenizer

from flashmap_hf import FlashMapDrafter, FlashMapGenerationConfig, check_target, drafters
from flashmap_hf.evaluation import baselines, memory
from flashmap_hf.evaluation.acceptance import weights_identity
from flashmap_hf.evaluation.memory import Footprint
from flashmap_hf.fingerprints import vocabulary_hash

Inputs = Mapping[str, torch.Tensor]  # [1, T] each
Generate = Callable[[Inputs, FlashMapGenerationConfig, BaseStreamer], torch.Tensor]  # -> [1, T + n]

PLAIN, FLASHMAP, STOCK_LOOP = "plain", "flashmap", "flashmap_stock_loop"
EQUAL = "flashmap_equal"  # trained by the command that trains the baselines, on the same blocks
EQUAL_SMALL_TREE = f"{EQUAL}_small_tree"  # the same, verifying as many tokens as a block has, as a tree
TREE_SIZE = 16  # nodes per verification
TRAINING = "training.json"  # of `flashmap train` and `flashmap baselines`
SHAPE = ("block_size", "num_hidden_layers", "head", "head_rank", "transition_rank", "draft_vocab_size", "window")
BASELINES = {  # what `baselines.load` gives -> label
    "dflash": "DFlash (factorised block)",
    "eagle": "EAGLE-style (autoregressive)",
    "medusa": "Medusa-style (parallel heads)",
}


@dataclass(frozen=True)
class Method:
    """One column of the benchmark.

    options: fields of the call's generation config. tree: a verification may hold several paths. once: measured in
    one round at the first temperature only, as a point of a curve. details: of the drafter, JSON-ready.
    """

    name: str
    label: str
    generate: Generate
    options: dict[str, Any] = field(default_factory=dict)
    footprint: Footprint = field(default_factory=Footprint)
    tree: bool = False
    once: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"name": self.name, "label": self.label, **self.footprint.to_dict(), **self.details}


def stock(target: PreTrainedModel, **keywords: Any) -> Generate:
    """The target's own `generate` with more keywords."""
    generate: Any = target.generate

    def call(inputs: Inputs, config: FlashMapGenerationConfig, streamer: BaseStreamer) -> torch.Tensor:
        output: torch.Tensor = generate(**inputs, generation_config=config, streamer=streamer, **keywords)
        return output

    return call


def plain(target: PreTrainedModel) -> Method:
    return Method(PLAIN, "plain", stock(target))


def prompt_lookup(target: PreTrainedModel, tokens: int) -> Method:
    return Method("prompt_lookup", "prompt lookup", stock(target), {"prompt_lookup_num_tokens": tokens})


def assistant(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> Method:
    """Stock assisted generation with the small language model `source`, a folder or a Hub id.

    Raises:
        OSError: it cannot be loaded.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype, use_safetensors=True)
    model = model.to(target.device).eval()
    own = AutoTokenizer.from_pretrained(source)
    keywords = {"assistant_model": model}
    if vocabulary_hash(own) != vocabulary_hash(tokenizer):
        keywords |= {"tokenizer": tokenizer, "assistant_tokenizer": own}
    footprint = memory.of_language_model(model)
    return Method("assistant", f"assisted, {Path(source).name}", stock(target, **keywords), footprint=footprint)


def early_exit(target: PreTrainedModel, layers: int) -> Method:
    """Stock assisted generation with the target's own first layers.

    Raises:
        ValueError: the target has not as many layers.
    """
    depth = target.config.get_text_config().num_hidden_layers
    if layers >= depth:
        raise ValueError(f"early_exit={layers}: must be below the target's {depth} layers.")
    options = {"assistant_early_exit": layers}
    footprint = memory.of_early_exit(target, layers)
    return Method("early_exit", f"early exit, layer {layers}", stock(target), options, footprint)


def trained_baselines(target: PreTrainedModel, folder: Path) -> list[Method]:
    """Each baseline of `folder`, in the order of `BASELINES`, then the FlashMap drafter that was trained beside them.

    Raises as `baselines.load` and `FlashMapDrafter.from_pretrained` do.

    Raises:
        ValueError: there is none.
    """
    found = [folder / name for name in BASELINES if (folder / name / "config.json").is_file()]
    if not found:
        names = ", ".join(BASELINES)
        raise ValueError(f"baselines={folder} holds none of {names}: train them with `flashmap baselines`.")
    equal = folder / FLASHMAP
    return [trained_baseline(target, path) for path in found] + (
        flashmap_equal(target, equal) if (equal / "config.json").is_file() else []
    )


def trained_baseline(target: PreTrainedModel, folder: Path) -> Method:
    baseline = baselines.load(folder, target)

    def call(inputs: Inputs, config: FlashMapGenerationConfig, streamer: BaseStreamer) -> torch.Tensor:
        output: torch.Tensor = baseline.generate(target, inputs, config, streamer=streamer)
        return output

    return Method(
        baseline.name,
        BASELINES[baseline.name],
        call,
        footprint=memory.of_baseline(baseline, target),
        details=details_of(str(folder), baseline.drafter),
    )


# --- FlashMap -------------------------------------------------------------------------------------------------------

OFF = {"num_steps": 1, "adaptive": False, "draft_ngrams": False}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> label, what is switched on
    FLASHMAP: ("FlashMap, one step", {}),
    "flashmap_midpoint": ("FlashMap, midpoint", {"num_steps": 2}),
    "flashmap_tree": ("FlashMap, tree", {"tree_size": TREE_SIZE}),
    "flashmap_ngrams": ("FlashMap, n-grams", {"draft_ngrams": True}),
    "flashmap_auto": ("FlashMap, automatic", {"adaptive": True, "draft_ngrams": True}),
}


def stock_loop(target: PreTrainedModel, drafter: FlashMapDrafter) -> Generate:
    """The drafter as a candidate generator in transformers' own assisted decoding, which our loop stands in for."""
    inside: Any = stock(target, assistant_model=drafter)
    cls: Any = type(target)

    def call(inputs: Inputs, config: FlashMapGenerationConfig, streamer: BaseStreamer) -> torch.Tensor:
        theirs = cls._assisted_decoding.__wrapped__  # what the hook wrapped
        with patch.object(cls, "_assisted_decoding", theirs):
            output: torch.Tensor = inside(inputs, config, streamer)
        return output

    return call


def flashmap(drafter: FlashMapDrafter, target: PreTrainedModel, source: str, curve: bool) -> list[Method]:
    """Every way, in transformers' own loop too, and for the curve one step at every block size."""
    details = details_of(source, drafter)
    ways = [(name, label, on) for name, (label, on) in WAYS.items()]
    sizes = range(1, drafter.config.block_size + 1) if curve else ()
    ways += [(f"{FLASHMAP}_k{size}", f"FlashMap, K = {size}", {"num_assistant_tokens": size}) for size in sizes]
    methods = [way(drafter, target, details, *this) for this in ways]
    one_step = methods[0]
    theirs = replace(one_step, name=STOCK_LOOP, label="FlashMap, stock loop", generate=stock_loop(target, drafter))
    return [one_step, theirs, *methods[1:]]


def way(
    drafter: FlashMapDrafter,
    target: PreTrainedModel,
    details: dict[str, Any],
    name: str,
    label: str,
    on: Mapping[str, Any],
) -> Method:
    """FlashMap with the options `on`, the others being off."""
    options = OFF | dict(on)
    return Method(
        name,
        label,
        stock(target, assistant_model=drafter),
        options,
        memory.of_drafter(drafter, target, options["num_steps"]),
        tree=any(on.get(key) for key in ("tree_size", "draft_ngrams", "adaptive")),
        once="num_assistant_tokens" in on,
        details=details,
    )


def flashmap_equal(target: PreTrainedModel, folder: Path) -> list[Method]:
    """The drafter that `flashmap baselines` trained as long as the others: a chain, and a tree that verifies as many
    tokens, which are compared with them; and a larger tree."""
    drafter = drafters.load(str(folder), dtype=target.dtype, device=target.device)
    check_target(drafter.config, target)
    details, label = details_of(str(folder), drafter), "FlashMap, trained as the baselines"
    tree, size = WAYS["flashmap_tree"][1], drafter.config.block_size
    return [
        way(drafter, target, details, EQUAL, label, {}),
        way(drafter, target, details, EQUAL_SMALL_TREE, f"{label}, tree of {size}", {"tree_size": size}),
        way(drafter, target, details, f"{EQUAL}_tree", f"{label}, tree", tree),
    ]


def variant(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> Method:
    """Another drafter, one step, once; raises as `FlashMapDrafter.from_pretrained` and `check_target` do."""
    drafter = drafters.load(source, dtype=target.dtype, device=target.device)
    check_target(drafter.config, target, tokenizer)
    name = Path(source).name
    method = way(drafter, target, details_of(source, drafter), f"{FLASHMAP}:{name}", f"FlashMap, {name}", {})
    return replace(method, once=True)


def details_of(source: str, drafter: PreTrainedModel) -> dict[str, Any]:
    """The shape of a drafter, which weights it has, and the blocks that the record beside them says it has seen."""
    shape = {name: getattr(drafter.config, name) for name in SHAPE}
    record = Path(source) / TRAINING
    blocks = json.loads(record.read_text(encoding="utf-8")).get("blocks") if record.is_file() else None
    return {"drafter": shape | {"weights": weights_identity(source, drafter), "blocks": blocks}}

"""`flashmap train --dry-run`: what a run would take on a GPU, as a record and as text."""

from math import ceil
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from flashmap_hf import target_outline
from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.loading import explained
from flashmap_hf.modeling_flashmap import config_for_target
from flashmap_hf.provenance import write_record
from flashmap_hf.training import dry_run, gpus
from flashmap_hf.training.config import TrainConfig

TARGET_CONFIG = "target_config.json"  # beside a recipe's config.json: the target's own, for where the Hub is not
RECORD = "dry_run.json"
GIB = 2**30


def reckon(config: TrainConfig) -> None:
    """Print the record of a dry run; with --out also write it."""
    found = record(config)
    console = Console()
    console.print(table(found))
    console.print(remarks(found), markup=False, soft_wrap=True)
    if config.out != Path():
        config.out.mkdir(parents=True, exist_ok=True)
        write_record(config.out / RECORD, found)
        console.print(str(config.out / RECORD), markup=False, soft_wrap=True)


def described(path: Path) -> FlashMapConfig:
    """The configuration in a file or folder, or of a drafter on the Hub.

    Raises:
        OSError: there is no such file, or it is no drafter's.
    """
    if path.suffix == ".json" and not path.is_file():
        raise OSError(f"--config {path}: there is no such file here; give the path from the current folder.")
    folder = path.parent if path.is_file() else path
    with explained(folder, {}):
        return FlashMapConfig.from_pretrained(folder)


def subject(config: TrainConfig) -> tuple[FlashMapConfig, PreTrainedModel]:
    """The drafter's configuration and the target's modules, on the meta device."""
    if config.config is None and config.drafter is None:
        target = target_outline.outline(config.target)
        fields: dict[str, Any] = {"hidden_size": config.hidden_size} if config.hidden_size else {}
        fields |= {"head": "low_rank", "head_rank": config.head_rank} if config.head_rank else {}
        proposable = target.config.get_text_config().vocab_size
        drafter = config_for_target(
            target, window=config.window, block_size=config.block_size, num_hidden_layers=config.layers,
            coupling=config.coupling, transition_rank=config.transition_rank,
            draft_vocab_size=config.draft_vocab if 0 < config.draft_vocab < proposable else None, **fields,
        )  # fmt: skip
        return drafter, target
    place = config.config or Path(str(config.drafter))
    drafter = described(place)
    beside = (place.parent if place.is_file() else place) / TARGET_CONFIG
    named = drafter.target_name or config.target
    return drafter, target_outline.outline(beside if beside.is_file() else named)


def record(config: TrainConfig) -> dict[str, Any]:
    """Every number of a dry run: JSON-ready, FLOP and bytes as integers."""
    drafter, modules = subject(config)
    target = dry_run.target_size(modules)
    check_shapes(drafter, modules)
    gpu = gpus.find(config.gpu) if config.gpu else gpus.Gpu("this GPU", config.gpu_tflops or 0, config.gpu_gib or 0)
    batch = dry_run.Batch(config.runs, config.run_length, config.kl > 0)
    steps = config.max_steps or ceil(config.tokens / batch.blocks)
    per_step = dry_run.step_flop(drafter, batch) + dry_run.update_flop(drafter, config)
    memory = dry_run.memory(drafter, config, batch)
    if config.online:
        memory["target in bfloat16"] = target.bytes
    flop = {"features": target.token_flop * config.tokens, "training": per_step * steps}
    speed = gpu.tflops * 1e12 * config.utilisation
    total = sum(memory.values())
    return {
        "target": {
            "name": drafter.target_name or config.target,
            "parameters": target.parameters,
            "parameters_per_token": target.active,
            "gib": target.bytes / GIB,
        },
        "drafter": {
            "parameters": dry_run.parameters(drafter),
            "gib": dry_run.HALF * dry_run.parameters(drafter) / GIB,
            "block_size": drafter.block_size,
            "weights_read": dry_run.weights_read(drafter) / target.active,
        },
        "tokens": config.tokens,
        "steps": steps,
        "blocks_per_step": batch.blocks,
        "blocks": steps * batch.blocks,
        "gpu": {"name": gpu.name, "tflops": gpu.tflops, "gib": gpu.gib, "utilisation": config.utilisation},
        "memory_gib": {name: size / GIB for name, size in memory.items()} | {"in all": total / GIB},
        "features_tib": 0.0 if config.online else dry_run.features_size(drafter, config.tokens) / 2**40,
        "gpus": {"features": ceil(target.bytes / GIB / gpu.gib), "training": ceil(total / GIB / gpu.gib)},
        "flop": {
            "target_per_token": target.token_flop,
            "draft_per_block": dry_run.draft_flop(drafter),
            **flop,
        },
        "gflop_per_block_trained": per_step / batch.blocks / 1e9,
        "eflop": {name: amount / 1e18 for name, amount in flop.items()},
        "gpu_hours": {name: amount / speed / 3600 for name, amount in flop.items()},
    }


def check_shapes(drafter: FlashMapConfig, target: PreTrainedModel) -> None:
    """Raise ValueError where the drafter's configuration is for a target of another shape."""
    text = target.config.get_text_config()
    for name, expected, found in (
        ("target_hidden_size", drafter.target_hidden_size, text.hidden_size),
        ("target_num_layers", drafter.target_num_layers, text.num_hidden_layers),
        ("vocab_size", drafter.vocab_size, text.vocab_size),
    ):
        if expected != found:
            raise ValueError(f"{name}={expected} in the drafter's configuration, but {found} in its target's: mend it.")


def table(found: dict[str, Any]) -> Table:
    """One row per number."""
    shown = Table(title=f"Training a drafter for {found['target']['name']} on {found['gpu']['name']}", box=box.SIMPLE)
    shown.add_column("")
    shown.add_column("", justify="right")
    for label, value in rows(found):
        shown.add_row(label, value)
    return shown


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a record, in words and figures; a recipe's card shows the same."""
    target, drafter = found["target"], found["drafter"]
    return [
        ("drafter: parameters", f"{drafter['parameters']:,}"),
        ("drafter in bfloat16, GiB", f"{drafter['gib']:.2f}"),
        ("weights that a draft reads, share of a target step's", f"{drafter['weights_read'] * 100:.1f} %"),
        ("target: parameters", f"{target['parameters']:,}"),
        ("target: parameters that a token meets", f"{target['parameters_per_token']:,}"),
        ("target in bfloat16, GiB", f"{target['gib']:.1f}"),
        *((f"training memory: {name}, GiB", f"{size:.2f}") for name, size in found["memory_gib"].items()),
        ("tokens of the answers", f"{found['tokens']:,}"),
        ("disk for their features, TiB (none with --online)", f"{found['features_tib']:.2f}"),
        ("steps", f"{found['steps']:,}"),
        ("GFLOP per block trained", f"{found['gflop_per_block_trained']:,.1f}"),
        ("EFLOP of the features", f"{found['eflop']['features']:.2f}"),
        ("EFLOP of the training", f"{found['eflop']['training']:.2f}"),
        ("GPU hours of the features", f"{found['gpu_hours']['features']:.1f}"),
        ("GPU hours of the training", f"{found['gpu_hours']['training']:.1f}"),
        ("GPUs that hold the target, for the features", f"{found['gpus']['features']:,}"),
        ("GPUs of this memory that the training would fill", f"{found['gpus']['training']:,}"),
    ]


def remarks(found: dict[str, Any]) -> str:
    """What the numbers assume."""
    gpu = found["gpu"]
    lines = [
        f"Reckoned, not measured: {gpu['utilisation'] * 100:.0f} % of {gpu['tflops']:g} TFLOP/s in bfloat16 "
        "(--utilisation), one pass over the answers. Letting the target answer comes first and is not in it: it waits "
        "for memory, not for products; time a part with `flashmap respond --limit`.",
    ]
    if found["gpus"]["training"] > 1:
        lines.append(
            f"The training does not fit into {gpu['gib']:g} GiB: fewer --runs, a smaller --draft-vocab or a narrower "
            "drafter need less."
        )
    if found["gpus"]["features"] > 1:
        lines.append(f"The target does not fit into {gpu['gib']:g} GiB: make features on several GPUs, or quantised.")
    return "\n".join(lines)

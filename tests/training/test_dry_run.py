"""`flashmap train --dry-run`: formulas against the model and torch's counters, recipes against the command."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_target
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flashmap_hf import FlashMapConfig, FlashMapDrafter, hub_card, target_outline
from flashmap_hf.cli import main
from flashmap_hf.training import dry_run, gpus
from flashmap_hf.training.blocks import draw, make_batch
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.dry_run import Batch
from flashmap_hf.training.dry_run_report import RECORD, record
from flashmap_hf.training.objective import BlockObjective
from flashmap_hf.training.optimisers import build_optimisers
from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.tied_transition import tie

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "hub_cards").glob("recipe-*"))
BASE: dict[str, Any] = {  # no two numbers equal, so that none stands in for another
    "target_hidden_size": 74, "target_num_layers": 6, "vocab_size": 211, "tap_layers": [2, 4, 6], "window": 7,
    "block_size": 5, "hidden_size": 52, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 22, "draft_vocab_size": 101,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"draft_vocab_size": None, "tokenizer_size": 199},
    {"hidden_size": 74, "coupling": "independent"},
    {"head": "low_rank", "head_rank": 9, "transition_rank": 17},
    {"transition_rank": 17},
    {"window": 40, "block_size": 9, "num_hidden_layers": 3, "num_key_value_heads": 3},
]
BATCH = Batch(runs=2, run_length=3)
NAMES = [" ".join(f"{k}={v}" for k, v in variant.items()) or "base" for variant in VARIANTS]


def config_of(variant: dict[str, Any]) -> FlashMapConfig:
    return FlashMapConfig(**(BASE | variant))


def train_config(**options: Any) -> TrainConfig:
    return TrainConfig(**({"dry_run": True, "gpu": "RTX 4090"} | options))


def objective(config: FlashMapConfig, kl: bool = False) -> tuple[BlockObjective, Any, Any]:
    """A step of `BATCH` on random features, ready to run."""
    width, length = config.target_hidden_size, 60
    generator = torch.Generator().manual_seed(0)

    def sequence() -> SequenceFeatures:
        return SequenceFeatures(
            taps=torch.randn(length, 3 * width, generator=generator),
            tokens=torch.randint(0, config.vocab_size, (length,), generator=generator),
            argmax=torch.zeros(length - 4, dtype=torch.int32),
            f_left=torch.zeros(length - 4), f_right=torch.full((length - 4,), 0.5), first=4,
        )  # fmt: skip

    rows = torch.randn(config.vocab_size, width, generator=generator)
    drafter = FlashMapDrafter(config).train()
    tie(drafter.head, 0)
    module = BlockObjective(drafter, rows.clone(), rows, 0.85, kl)
    batch = make_batch(
        [sequence() for _ in range(BATCH.runs)], [41] * BATCH.runs, BATCH.run_length, config.window, config.block_size,
        width if kl else 0,
    )  # fmt: skip
    noise = width if config.coupling == "independent" else 0
    return module, batch, draw(batch, generator, hide_share=0.2, start_share=0.85, noise_size=noise)


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_every_parameter_has_the_shape_of_the_model(variant: dict[str, Any]) -> None:
    config = config_of(variant)
    with torch.device("meta"):
        model = FlashMapDrafter(config)
    assert dry_run.shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert dry_run.parameters(config) == sum(p.numel() for p in model.parameters())


def test_muon_moves_the_matrices_that_the_trainer_gives_it() -> None:
    config = config_of({"transition_rank": 17})
    drafter = FlashMapDrafter(config)
    tie(drafter.head, 0)
    assert dry_run.trained(config) == {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    optimisers = build_optimisers(list(drafter.parameters()), train_config(optimiser="muon"), torch.device("cpu"))
    moved = [tuple(p.shape) for group in optimisers["muon"].param_groups for p in group["params"]]
    assert sorted(moved) == sorted(dry_run.orthogonalised(config))


# --- FLOP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_a_step_is_what_torch_counts(variant: dict[str, Any], kl: bool) -> None:
    config = config_of(variant)
    module, batch, draws = objective(config, kl)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # as products, which the counter knows; a fused kernel recomputes
        found = module(batch, draws)
        forward = counter.get_total_flops()
        found.sums.sum().backward()
    expected = Batch(BATCH.runs, BATCH.run_length, kl)
    products = dry_run.forward_products(config, expected) + dry_run.training_products(config, expected)
    assert forward == sum(flop for flop, _ in products)
    assert counter.get_total_flops() == dry_run.step_flop(config, expected)


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_drafting_a_block_is_what_torch_counts(variant: dict[str, Any]) -> None:
    config = config_of(variant)
    drafter = FlashMapDrafter(config).eval()
    width = config.target_hidden_size
    rows = torch.randn(drafter.head.size, width)
    noise = torch.randn(1, config.block_size, width) if config.coupling == "independent" else None
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        drafted = drafter(
            torch.randn(1, config.window, 3 * width), torch.randn(1, width), rows=rows,
            u=torch.zeros(1, config.block_size), noise=noise,
        )  # fmt: skip
        previous = torch.zeros(1, config.block_size, dtype=torch.long)
        drafter.head.biased(drafted.logits, drafted.z_1, previous)
    assert counter.get_total_flops() == dry_run.draft_flop(config)


def test_an_update_is_what_torch_counts() -> None:
    config = config_of({})
    drafter = FlashMapDrafter(config)
    train = train_config(optimiser="muon", ns_steps=4)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    counter = FlopCounterMode(display=False)
    with counter:
        build_optimisers(list(drafter.parameters()), train, torch.device("cpu"))["muon"].step()
    assert counter.get_total_flops() == dry_run.update_flop(config, train)
    assert dry_run.update_flop(config, train_config(optimiser="adamw")) == 0


def test_what_grows_grows_in_proportion() -> None:
    config = config_of({})

    def layers(count: int) -> int:
        return dry_run.step_flop(config_of({"num_hidden_layers": count}), BATCH)

    assert layers(5) - layers(3) == layers(3) - layers(1) > 0
    assert dry_run.step_flop(config, Batch(6, 3)) == 3 * dry_run.step_flop(config, Batch(2, 3))
    assert dry_run.activations(config, Batch(6, 3)) == 3 * dry_run.activations(config, Batch(2, 3))
    assert dry_run.features_size(config, 200) == 2 * dry_run.features_size(config, 100)
    single, double = (dry_run.draft_flop(config_of({"num_steps": steps})) for steps in (1, 2))
    assert double == 2 * single


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_activations_are_at_least_what_autograd_keeps_and_little_more(variant: dict[str, Any]) -> None:
    config = config_of(variant)
    module, batch, draws = objective(config)
    ours = [*module.drafter.parameters(), *module.drafter.buffers(), module.embeddings, module.unembedding,
            module.representations, module.rows, *vars(batch).values()]  # fmt: skip
    known = {tensor.untyped_storage().data_ptr() for tensor in ours}
    kept: dict[int, torch.Tensor] = {}  # holds them, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(batch, draws)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert measured <= dry_run.activations(config, BATCH) <= 1.3 * measured


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_the_optimiser_keeps_what_is_reckoned(optimiser: str) -> None:
    config = config_of({})
    train = train_config(optimiser=optimiser)
    drafter = FlashMapDrafter(config)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = 0
    for built in build_optimisers(list(drafter.parameters()), train, torch.device("cpu")).values():
        built.step()
        states = [value for state in built.state.values() for value in state.values()]
        kept += sum(s.numel() * s.element_size() for s in states if isinstance(s, torch.Tensor) and s.ndim)
    assert kept == dry_run.memory(config, train, BATCH)["optimiser"]


# --- the target -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen3_moe", False), ("gpt2", True)])
def test_what_a_token_meets_is_what_torch_counts(family: str, tied: bool) -> None:
    """Without attention over the context, which grows with it: a single token has almost none."""
    target = tiny_target(family, tie_word_embeddings=tied, attn_implementation="eager")
    size = dry_run.target_size(target)
    assert size.parameters == sum(p.numel() for p in target.parameters())
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        target(torch.tensor([[5]]))
    text = target.config
    heads = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = 4 * text.num_attention_heads * heads * text.num_hidden_layers  # one query, one key
    assert counter.get_total_flops() == size.token_flop + attention


@pytest.mark.parametrize(
    ("recipe", "parameters", "per_token"),
    # The makers' own words: 8.2, 70.6 and 671 billion parameters, of the last 37 billion per token.
    [("recipe-qwen3-8b", 8.2, 7.6), ("recipe-llama-3.3-70b", 70.6, 69.5), ("recipe-deepseek-v3", 671.0, 36.6)],
)
def test_the_targets_of_the_recipes_have_their_published_sizes(
    recipe: str, parameters: float, per_token: float
) -> None:
    found = json.loads((ROOT / "hub_cards" / recipe / RECORD).read_text())["target"]
    assert round(found["parameters"] / 1e9, 1) == parameters
    assert round(found["parameters_per_token"] / 1e9, 1) == per_token


# --- the record, and the recipes ------------------------------------------------------------------------------------


def test_the_three_recipes_are_there() -> None:
    assert [path.name for path in RECIPES] == ["recipe-deepseek-v3", "recipe-llama-3.3-70b", "recipe-qwen3-8b"]


@pytest.mark.parametrize("folder", RECIPES, ids=lambda path: path.name)
def test_a_recipe_says_what_the_command_says(folder: Path) -> None:
    written = json.loads((folder / RECORD).read_text())
    assert written.pop("provenance")["command"].startswith("python -m flashmap_hf train --dry-run --config config.json")
    found = record(train_config(config=folder / "config.json", gpu=written["gpu"]["name"], run_length=16))
    assert found == written
    hub_card.check(folder)
    text = (folder / "README.md").read_text()
    assert "There are no weights here, nobody has trained them, and nothing was measured." in text
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize("folder", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_a_configuration_of_a_drafter(folder: Path) -> None:
    config = FlashMapConfig.from_pretrained(folder)
    with torch.device("meta"):
        assert sum(p.numel() for p in FlashMapDrafter(config).parameters()) == dry_run.parameters(config)
    assert config.target_name and config.tap_layers and config.tap_layers[-1] == config.target_num_layers


def test_hours_follow_from_the_gpu(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path)

    def found(**options: Any) -> dict[str, Any]:
        return record(train_config(target=str(tmp_path), block_size=3, tokens=10**9, **options))

    known, own = found(gpu="A100 80GB"), found(gpu=None, gpu_tflops=156.0, gpu_gib=40.0, utilisation=0.6)
    assert own["flop"] == known["flop"] and own["memory_gib"] == known["memory_gib"]
    for part, hours in known["gpu_hours"].items():
        assert own["gpu_hours"][part] == pytest.approx(hours, rel=1e-12)
        assert hours * 3600 * 312e12 * 0.3 == pytest.approx(known["flop"][part], rel=1e-12)
    assert known["steps"] == ceil(10**9 / 48) and found(max_steps=7)["blocks"] == 7 * 48
    online = found(online=True)["memory_gib"]
    assert online["in all"] - known["memory_gib"]["in all"] == pytest.approx(online["target in bfloat16"], rel=1e-12)


def test_the_options_describe_a_drafter_too(tmp_path: Path) -> None:
    target = tiny_target()
    target.save_pretrained(tmp_path)
    found = record(train_config(target=str(tmp_path), layers=2, draft_vocab=20, transition_rank=4, hidden_size=16))
    drafter = FlashMapDrafter.from_target(
        target, num_hidden_layers=2, draft_vocab_size=20, transition_rank=4, hidden_size=16, window=16
    )
    assert found["drafter"]["parameters"] == sum(p.numel() for p in drafter.parameters())
    drafter.save_pretrained(tmp_path / "drafter")
    outlined = target_outline.outline(tmp_path)
    outlined.config.save_pretrained(tmp_path / "drafter" / "target")
    (tmp_path / "drafter" / "target" / "config.json").rename(tmp_path / "drafter" / "target_config.json")
    again = record(train_config(drafter=str(tmp_path / "drafter"), layers=4))
    assert again["drafter"]["parameters"] == found["drafter"]["parameters"]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = ROOT / "hub_cards" / "recipe-qwen3-8b"
    args = ["train", "--dry-run", "--config", str(recipe / "config.json"), "--gpu", "rtx4090", "--out", str(tmp_path)]
    assert main(args) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Training a drafter for Qwen/Qwen3-8B on RTX 4090" in printed
    assert "Reckoned, not measured: 30 % of 165.2 TFLOP/s in bfloat16" in printed
    written = json.loads((tmp_path / RECORD).read_text())
    assert f"{written['drafter']['parameters']:,}" in printed and written["provenance"]["command"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name a GPU with --gpu, or describe one with --gpu-tflops and --gpu-gib"),
        (["--gpu", "RTX 4090", "--gpu-gib", "24"], "name a GPU with --gpu, or describe one"),
        (["--gpu", "GTX 1080"], "--gpu 'GTX 1080': choose one of RTX 3090, RTX 4090"),
        (["--gpu-tflops", "100", "--gpu-gib", "-1"], "gpu_gib=-1.0: must be a finite number greater than 0"),
        (["--gpu", "L4", "--utilisation", "1.5"], "utilisation=1.5: must lie between 0 and 1"),
        (["--gpu", "L4", "--tokens", "0"], "tokens=0: must be"),
        (["--gpu", "L4", "--lora", "8", "--drafter", "x/y"], "leave out --lora"),
        (["--gpu", "L4", "--config", "x", "--layers", "2"], "--config describes the drafter: leave out --layers"),
        (
            ["--gpu", "L4", "--config", "no-recipe/config.json"],
            "--config no-recipe/config.json: there is no such file here",
        ),
        (["--gpu", "L4", "--config", "/no/such/folder"], "cannot be loaded: there is no such folder"),
        (["--gpu", "L4", "--target", "/no/such/folder"], "the configuration of target '/no/such/folder'"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["train", "--dry-run", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_configuration_for_another_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "target_config.json"):
        source = ROOT / "hub_cards" / "recipe-qwen3-8b" / name
        (tmp_path / name).write_text(
            source.read_text().replace("151936", "151937" if name == "config.json" else "151936")
        )
    assert main(["train", "--dry-run", "--config", str(tmp_path), "--gpu", "L4"]) == 2
    assert "vocab_size=151937 in the drafter's configuration, but 151936 in its target's" in capsys.readouterr().err


def test_gpus_are_found_by_name() -> None:
    assert {gpus.find(name).name for name in ("rtx 4090", "RTX4090", " RTX 4090 ")} == {"RTX 4090"}
    assert len({gpu.name for gpu in gpus.GPUS}) == len(gpus.GPUS)
    assert all(gpu.tflops > 50 and gpu.gib >= 24 for gpu in gpus.GPUS)

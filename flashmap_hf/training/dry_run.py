"""What training a drafter takes, by formulas of its configuration: parameters, memory, FLOP. Nothing is loaded or run.

B = S * A blocks of a step: S runs of A anchors. K tokens of a block, n = K + 1 slots, W context positions, D and H the
target's and the drafter's width, N the draft vocabulary. One multiplication and one addition are two FLOP.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import PreTrainedModel

from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.optimisers import LEAST_SIDE
from flashmap_hf.velocity import NUM_U_COSINES

Shape = tuple[int, ...]
FLOAT, HALF = 4, 2  # bytes


@dataclass(frozen=True)
class Batch:
    """runs: S; run_length: A; kl: the loss against the target's law is on."""

    runs: int
    run_length: int
    kl: bool = False

    @property
    def blocks(self) -> int:
        return self.runs * self.run_length

    def positions(self, window: int) -> int:
        """Context positions of a step: those of a run are shared by its anchors."""
        return self.runs * (window + self.run_length - 1)


def vocabulary(config: FlashMapConfig) -> int:
    """N."""
    return config.draft_vocab_size or config.num_proposable


def num_taps(config: FlashMapConfig) -> int:
    return len(config.tap_layers or [0])


# --- parameters -----------------------------------------------------------------------------------------------------


def shapes(config: FlashMapConfig) -> dict[str, Shape]:
    """Every parameter of `FlashMapDrafter(config)`."""
    target, width, inner = config.target_hidden_size, config.hidden_size, config.intermediate_size
    taps, size, head = num_taps(config), vocabulary(config), config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    found: dict[str, Shape] = {f"context_encoder.tap_norms.{i}.weight": (target,) for i in range(taps)}
    found |= {
        "context_encoder.fuse.weight": (width, taps * target),
        "context_encoder.norm.weight": (width,),
        "anchor_norm.weight": (target,),
        "anchor_proj.weight": (width, target),
        "z_proj.weight": (width, target),
        "slot_embedding": (config.block_size + 1, width),
        "noise_embedding.u_in.weight": (width, 3 + NUM_U_COSINES),
        "noise_embedding.u_in.bias": (width,),
        "noise_embedding.u_out.weight": (width, width),
        "noise_embedding.hidden_u": (width,),
        "noise_embedding.s_in.weight": (width, 1 + NUM_U_COSINES),
        "noise_embedding.s_in.bias": (width,),
        "noise_embedding.s_out.weight": (width, width),
        "norm.weight": (width,),
        "head.readout_scale": (target,),
    }
    layer: dict[str, Shape] = {
        "attention_norm.weight": (width,),
        "attention.q_proj.weight": (queries, width),
        "attention.k_proj.weight": (keys, width),
        "attention.v_proj.weight": (keys, width),
        "attention.o_proj.weight": (width, queries),
        "attention.q_norm.weight": (head,),
        "attention.k_norm.weight": (head,),
        "mlp_norm.weight": (width,),
        "gate_proj.weight": (inner, width),
        "up_proj.weight": (inner, width),
        "down_proj.weight": (width, inner),
    }
    for i in range(config.num_hidden_layers):
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if width != target:
        found["endpoint_proj.weight"] = (target, width)
    if config.head_rank is not None:
        found |= {"head.down.weight": (config.head_rank, target), "head.up.weight": (size, config.head_rank)}
    if config.transition_rank is not None:
        rank = config.transition_rank
        found |= {
            "head.transition.previous.weight": (size + 1, rank),
            "head.transition.endpoint.weight": (rank, target),
            "head.transition.readout.weight": (size, rank),
        }
    return found


def parameters(config: FlashMapConfig) -> int:
    """Of the drafter."""
    return sum(map(prod, shapes(config).values()))


def trained(config: FlashMapConfig) -> dict[str, Shape]:
    """Every parameter while it is trained: a transition is tied to the target's matrices."""
    found = shapes(config)
    if config.transition_rank is not None:
        rank, target = config.transition_rank, config.target_hidden_size
        found |= {
            "head.transition.outside": (rank,),
            "head.transition.previous.weight": (rank, target),
            "head.transition.readout.weight": (target, rank),
        }
    return found


def orthogonalised(config: FlashMapConfig) -> list[Shape]:
    """The matrices that Muon moves, as `build_optimisers` chooses them."""
    return [shape for shape in trained(config).values() if len(shape) == 2 and min(shape) >= LEAST_SIDE]


# --- FLOP -----------------------------------------------------------------------------------------------------------


def forward_products(config: FlashMapConfig, batch: Batch) -> list[tuple[int, int]]:
    """FLOP of each product in drafting a batch, and how many products of that size its backward needs."""
    target, width, inner = config.target_hidden_size, config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layers, slots = config.num_hidden_layers, config.block_size + 1
    positions, blocks = batch.positions(config.window), batch.blocks
    tokens, rows = blocks * config.block_size, blocks * slots
    found = [
        (2 * positions * num_taps(config) * target * width, 2),  # fuse
        (2 * positions * width * 2 * keys * layers, 2),  # context -> keys and values
        (2 * blocks * target * width, 2),  # the anchor
        (2 * tokens * target * width, 1),  # z: nothing before it is trained
        (2 * blocks * (1 + NUM_U_COSINES) * width, 1),
        (2 * blocks * width * width, 2),  # time
        (2 * rows * width * (queries + 2 * keys) * layers, 2),
        (4 * rows * (config.window + slots) * queries * layers, 2),  # scores and their sums
        (2 * rows * queries * width * layers, 2),
        (6 * rows * width * inner * layers, 2),
    ]
    if config.coupling == "quantile":
        found += [(2 * tokens * (3 + NUM_U_COSINES) * width, 1), (2 * tokens * width * width, 2)]
    if width != target:
        found.append((2 * tokens * width * target, 2))
    size = vocabulary(config)
    if config.head_rank is None:
        found.append((2 * tokens * target * size, 1))  # the target's rows are not trained
    else:
        found.append((2 * tokens * config.head_rank * (target + size), 2))
    if config.transition_rank is not None:
        found.append((2 * tokens * config.transition_rank * target, 2))
    return found


def training_products(config: FlashMapConfig, batch: Batch) -> list[tuple[int, int]]:
    """Those of a step beside what drafting its blocks takes."""
    target, size, rank = config.target_hidden_size, vocabulary(config), config.transition_rank
    tokens = batch.blocks * config.block_size
    found = []
    if rank is not None:  # tied to the target's matrices, which are not trained
        found += [(2 * tokens * target * rank, 1), (2 * tokens * rank * target, 2)]
        if config.head_rank is not None:  # the shared head reads the bias off with the endpoint
            found.append((2 * tokens * target * size, 1))
    if batch.kl:
        found.append((2 * batch.runs * (batch.run_length + config.block_size - 1) * target * size, 0))
    return found


def step_flop(config: FlashMapConfig, batch: Batch) -> int:
    """Forward and backward of one step; attention counts by its four and eight products."""
    products = forward_products(config, batch) + training_products(config, batch)
    return sum(flop * (1 + backward) for flop, backward in products)


def draft_flop(config: FlashMapConfig) -> int:
    """Drafting one block when generating, context included (an Euler step; the midpoint rule passes twice)."""
    alone = sum(flop for flop, _ in forward_products(config, Batch(1, 1)))
    tables = 2 * config.block_size * (config.transition_rank or 0) * vocabulary(config)
    return (alone + tables) * config.num_steps


def weights_read(config: FlashMapConfig) -> int:
    """Weights that drafting a block reads: the drafter's, and the target's rows of the draft vocabulary."""
    rows = vocabulary(config) * config.target_hidden_size if config.head_rank is None else 0
    return (parameters(config) + rows) * config.num_steps


def update_flop(config: FlashMapConfig, train: TrainConfig) -> int:
    """Newton-Schulz of Muon, once per step; the rest of an update is no product of matrices."""
    if train.optimiser != "muon":
        return 0
    sides = [(min(shape), max(shape)) for shape in orthogonalised(config)]
    return train.ns_steps * sum(4 * short * short * long + 2 * short**3 for short, long in sides)


# --- memory, in bytes -----------------------------------------------------------------------------------------------


def activations(config: FlashMapConfig, batch: Batch) -> int:
    """What the forward of one step keeps for its backward, in float32; autocast keeps less."""
    target, width, inner = config.target_hidden_size, config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layers, slots, size = config.num_hidden_layers, config.block_size + 1, vocabulary(config)
    positions, blocks = batch.positions(config.window), batch.blocks
    context = positions * (2 * num_taps(config) * target + 3 * width + 3 * keys * layers)
    per_slot = 4 * inner + 5 * width + 6 * queries + 6 * keys
    per_layer = blocks * (slots * per_slot + 2 * keys * (config.window + slots))
    ends = blocks * (config.block_size * (5 * target + 8 * width + size) + 2 * target + 4 * width)
    if config.head_rank is not None:
        ends += blocks * config.block_size * config.head_rank
    if config.transition_rank is not None:
        ends += blocks * config.block_size * 4 * config.transition_rank
    return FLOAT * (context + per_layer * layers + ends)


def memory(config: FlashMapConfig, train: TrainConfig, batch: Batch) -> dict[str, int]:
    """Bytes of each part of a training step on stored features."""
    count, size = sum(map(prod, trained(config).values())), vocabulary(config)
    moved = sum(map(prod, orthogonalised(config))) if train.optimiser == "muon" else 0
    taps = num_taps(config) * config.target_hidden_size
    logits = batch.blocks * config.block_size * size
    return {
        "weights, gradients, averaged weights": 3 * FLOAT * count,
        "bfloat16 copies under autocast": HALF * sum(prod(s) for s in trained(config).values() if len(s) == 2),
        "optimiser": FLOAT * moved + 2 * FLOAT * (count - moved),
        "embeddings and unembedding of the target": FLOAT
        * config.target_hidden_size
        * (3 * config.vocab_size + size),  # x_1 of each token is a third one
        "batch": FLOAT * batch.positions(config.window) * taps,
        "activations": activations(config, batch),
        "gradient of the logits": 2 * FLOAT * logits,
    }


def features_size(config: FlashMapConfig, tokens: int) -> int:
    """Bytes on disk of the stored features of so many tokens: their taps, in bfloat16."""
    return HALF * tokens * num_taps(config) * config.target_hidden_size


# --- the target -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetSize:
    """parameters: all; active: those that multiply a token's vector (no embedding, of the experts those it visits)."""

    parameters: int
    active: int

    @property
    def bytes(self) -> int:
        """In bfloat16, as features are made."""
        return HALF * self.parameters

    @property
    def token_flop(self) -> int:
        """One forward, per token; attention over the context is left out."""
        return 2 * self.active


def target_size(target: PreTrainedModel) -> TargetSize:
    """Of a target's modules, on any device, the meta device too."""
    text = target.config.get_text_config()
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((getattr(text, name) for name in names if getattr(text, name, None)), 1)
    visited = getattr(text, "num_experts_per_tok", None) or experts
    looked_up = {id(m.weight) for m in target.modules() if isinstance(m, torch.nn.Embedding)}
    active = 0
    for name, parameter in target.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in looked_up:
            routed = ".experts." in name and ".shared_experts." not in name
            active += parameter.numel() * visited // experts if routed else parameter.numel()
    unembedding: Any = target.get_output_embeddings()
    if id(unembedding.weight) in looked_up:  # tied
        active += unembedding.weight.numel()
    return TargetSize(sum(p.numel() for p in target.parameters()), active)

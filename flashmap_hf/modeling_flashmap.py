"""FlashMapDrafter: composes context, flow and head into a `PreTrainedModel` that proposes K tokens in one pass."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import CommitInfo
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from flashmap_hf import loading, sharing
from flashmap_hf.conditioning import ContextEncoder, default_tap_layers
from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.fingerprints import chat_template_hash, vocabulary_hash
from flashmap_hf.flow import euler, midpoint, quantile_prior
from flashmap_hf.generation_config import FlashMapGenerationConfig
from flashmap_hf.head import DraftHead, unembedding_rows
from flashmap_hf.velocity import NoiseEmbedding, SlotLayer, rotation

HUB_KEYWORDS = ("repo_id", "commit_message", "commit_description", "create_pr", "private", "revision", "tags")
KeyValues = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys and values [B, Hkv, W, head_dim]


class Context(NamedTuple):
    """What conditions a block."""

    states: torch.Tensor  # [B, W, H], newest last
    keys_values: KeyValues


@dataclass
class FlashMapOutput(ModelOutput):
    """z_1: `[B, K, D]`, where the flow lands; logits: `[B, K, N]` over the draft vocabulary (`head.ids`).

    The logits are marginal: what a transition adds depends on the tokens drafted, see `DraftHead.biased`.
    """

    z_1: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class FlashMapDrafter(PreTrainedModel):
    """Maps noise to the representations of the next K tokens in one pass, conditioned on the target's hidden states."""

    prior_direction: torch.Tensor
    config: FlashMapConfig
    config_class = FlashMapConfig
    base_model_prefix = "drafter"
    main_input_name = "taps"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["SlotLayer"]

    def __init__(self, config: FlashMapConfig):
        super().__init__(config)
        width = config.hidden_size
        assert config.tap_layers is not None  # filled by the config
        self.context_encoder = ContextEncoder(
            len(config.tap_layers), config.target_hidden_size, width, config.rms_norm_eps
        )
        self.anchor_norm = nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps)
        self.anchor_proj = nn.Linear(config.target_hidden_size, width, bias=False)
        self.z_proj = nn.Linear(config.target_hidden_size, width, bias=False)
        self.slot_embedding = nn.Parameter(torch.zeros(config.block_size + 1, width))
        self.noise_embedding = NoiseEmbedding(config)
        self.register_buffer("prior_direction", torch.zeros(config.target_hidden_size))  # not trained, but saved
        self.layers = nn.ModuleList([SlotLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.endpoint_proj = (
            nn.Identity()
            if width == config.target_hidden_size
            else nn.Linear(width, config.target_hidden_size, bias=False)
        )
        self.head = DraftHead(config)
        self.gradient_checkpointing = False
        self.generation_config = FlashMapGenerationConfig()
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FlashMapDrafter):
            nn.init.normal_(module.slot_embedding, std=self.config.initializer_range)
            nn.init.normal_(module.prior_direction)
            module.prior_direction.div_(module.prior_direction.norm())
        elif isinstance(module, NoiseEmbedding):
            nn.init.zeros_(module.hidden_u)
        elif isinstance(module, DraftHead):
            nn.init.ones_(module.readout_scale)
            if module.transition is not None:  # not visited itself: transformers skips modules without own parameters
                module.transition.reset_parameters()

    # taps -> context, once per committed position

    def context(self, taps: torch.Tensor, positions: torch.Tensor) -> Context:
        """The states of committed positions, and their keys and values for every layer.

        Args:
            taps: `[B, W, N * D]` of `conditioning.tap`, any float dtype.
            positions: `[B, W]` in the same count as the anchor's position; only differences matter.
        """
        states = self.context_encoder(taps.to(self.dtype))
        layers: Iterable[Any] = self.layers
        by = rotation(positions, self.config.head_dim, self.config.rope_theta, self.dtype)
        return Context(states, [layer.attention.keys_values(states, by) for layer in layers])

    # the velocity network

    def endpoint(
        self,
        z: torch.Tensor,
        s: torch.Tensor,
        u: torch.Tensor | None,
        anchor_embeds: torch.Tensor,
        anchor_positions: torch.Tensor,
        context: Context,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """The endpoint `x^` of the path through `z` at time `s`; the velocity is `(x^ - z) / (1 - s)`.

        Args:
            z: `[B, K, D]`; s: `[B]`.
            u: `[B, K]` noise of the quantile coupling; NaN entries are hidden from the network. None: all hidden.
            anchor_embeds: `[B, D]`, the target's input embedding of the newest committed token.
            anchor_positions: `[B]`.
            context: from `context`; of its states only the newest is read.
            mask: `[B, W]`, True where the context position exists. None: all do.

        Returns:
            `[B, K, D]`.
        """
        batch, slots = z.shape[0], z.shape[1]
        anchor = self.anchor_proj(self.anchor_norm(anchor_embeds.to(self.dtype)))
        noise: torch.Tensor = self.noise_embedding.hidden_u
        if u is not None:
            known = self.noise_embedding.noise(u.nan_to_num(0.0))
            noise = torch.where(u.isnan().unsqueeze(-1), noise, known)
        drafted = self.z_proj(z.to(self.dtype)) + noise
        if self.config.anchored_slots:
            drafted = drafted + (anchor + context.states[:, -1]).unsqueeze(1)
        x = torch.cat([anchor.unsqueeze(1), drafted], dim=1) + self.slot_embedding[: slots + 1]
        x = x + self.noise_embedding.time(s)
        positions = anchor_positions[:, None] + torch.arange(slots + 1, device=z.device)
        by = rotation(positions, self.config.head_dim, self.config.rope_theta, self.dtype)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(batch, slots + 1)], dim=1)[:, None, None, :]
        for layer, keys_values in zip(self.layers, context.keys_values, strict=True):
            x = layer(x, by, keys_values, mask)
        return self.endpoint_proj(self.norm(x[:, 1:]))

    def prior(self, u: torch.Tensor | None, noise: torch.Tensor | None, batch: int, slots: int) -> torch.Tensor:
        """`z_0` `[B, K, D]`: carries u (quantile) or is the Gaussian `noise` (independent); zero without either."""
        if self.config.coupling == "independent":
            if noise is None:
                raise ValueError("coupling='independent' draws z_0: pass noise of shape [B, K, D].")
            return noise.to(self.dtype)
        if u is None:
            return self.prior_direction.new_zeros(batch, slots, self.config.target_hidden_size)
        return quantile_prior(u, self.prior_direction).nan_to_num(0.0)

    def forward(
        self,
        taps: torch.Tensor,
        anchor_embeds: torch.Tensor,
        rows: torch.Tensor | None = None,
        u: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        num_steps: int | None = None,
    ) -> FlashMapOutput:
        """Draft one block.

        Args:
            taps: `[B, W, N * D]`, taps of the last W committed positions, newest last.
            anchor_embeds: `[B, D]`, the target's input embedding of the newest committed token.
            rows: `[N, D]`, the target's unembedding rows of `head.ids`; not used by the low-rank head.
            u: `[B, K]` noise of the quantile coupling (0 = greedy); None hides it from the network.
            noise: `[B, K, D]` Gaussian, `coupling="independent"` only.
            mask: `[B, W]`, False where a position does not exist (left side).
            num_steps: overrides the config's: 1 Euler step or 2 (midpoint).

        Returns:
            `FlashMapOutput` with `z_1` `[B, K, D]` and `logits` `[B, K, N]`.
        """
        batch, window = taps.shape[:2]
        slots = self.config.block_size
        context = self.context(taps, torch.arange(window, device=taps.device)[None])
        anchor_positions = torch.full((batch,), window, device=taps.device)
        z_0 = self.prior(u, noise, batch, slots)
        if self.config.coupling == "independent":
            u = None

        def endpoint_fn(z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return self.endpoint(z, s, u, anchor_embeds, anchor_positions, context, mask)

        solve = midpoint if (num_steps or self.config.num_steps) == 2 else euler
        z_1 = solve(endpoint_fn, z_0)
        return FlashMapOutput(z_1=z_1, logits=self.head(z_1, rows))

    # files

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As `PreTrainedModel.from_pretrained`, from safetensors only, and with every key in its place.

        Returns:
            The drafter in evaluation mode; with `output_loading_info=True` also the dictionary of its keys.

        Raises:
            OSError: a file is missing, damaged or of another kind, or keys are missing, unexpected or of another shape;
                names the folder, or repository and revision.
            ValueError: an argument or a value of the configuration is not possible.
        """
        name = pretrained_model_name_or_path
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False would open pickled weights, which can run code: leave it out.")
        forced = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        with loading.explained(name, kwargs):
            pinned = loading.pinned(name, kwargs)
            loaded: Any = super().from_pretrained(name, *model_args, **(pinned | forced))
            drafter, info = loaded
            loading.check_keys(info, kwargs)
            drafter.config._commit_hash = loading.commit(name, pinned)
            given = kwargs.get("generation_config")
            drafter.generation_config = given or loading.generation_config(name, pinned)
        return (drafter, info) if output_loading_info else drafter

    def save_pretrained(  # type: ignore[override]  # the other arguments are passed on
        self, save_directory: str | os.PathLike[str], *, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As `PreTrainedModel.save_pretrained`, with the drafter's `generation_config`."""
        hub = {key: kwargs.pop(key) for key in HUB_KEYWORDS if key in kwargs}
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            self.generation_config.save_pretrained(save_directory)
            if push_to_hub:  # not by the call above, which would leave the generation config behind
                repo_id = hub.pop("repo_id", Path(save_directory).name)
                self.push_to_hub(repo_id, token=kwargs.get("token"), **hub)

    def push_to_hub(  # type: ignore[override]  # the other arguments are passed on
        self, repo_id: str, *, max_shard_size: int | str = "50GB", **kwargs: Any
    ) -> CommitInfo:
        """As `PreTrainedModel.push_to_hub`; a repository without a card gets one that `flashmap list` finds.

        Raises:
            OSError: the Hub refuses or cannot be reached; says what to do.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            return sharing.upload(Path(folder), self.config.target_name, repo_id, **kwargs)

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **overrides: Any
    ) -> "FlashMapDrafter":
        """An untrained drafter that fits `target`; `overrides` are fields of `FlashMapConfig`.

        Raises:
            ValueError: the target is an encoder-decoder or has no output embeddings, or an override is out of range.
        """
        drafter = cls(config_for_target(target, tokenizer, **overrides))
        output_embeddings = target.get_output_embeddings()
        if drafter.config.head == "shared" and output_embeddings is not None:
            rows = unembedding_rows(output_embeddings, drafter.head.ids[:1024], drafter.config.target_hidden_size)
            # logits of a random endpoint of unit RMS start with standard deviation 1, whatever the target's scale
            with torch.no_grad():
                drafter.head.readout_scale.fill_(1.0 / rows.float().square().sum(-1).mean().sqrt())
        return drafter


def config_for_target(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **overrides: Any
) -> FlashMapConfig:
    """The default configuration of a drafter for `target`, with `overrides`."""
    text: PreTrainedConfig = target.config.get_text_config()
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder: FlashMap drafts for decoder-only targets.")
    if target.get_output_embeddings() is None:
        raise ValueError(f"{type(target).__name__} has no output embeddings: load it with AutoModelForCausalLM.")
    width, layers = text.hidden_size, text.num_hidden_layers
    heads = max(1, width // 64)
    fields: dict[str, Any] = {
        "target_name": target.config.name_or_path,
        "target_revision": getattr(target.config, "_commit_hash", None),
        "target_hidden_size": width,
        "target_num_layers": layers,
        "vocab_size": text.vocab_size,
        **{name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tap_layers": default_tap_layers(layers),
        "anchored_slots": True,
        "hidden_size": width,
        "intermediate_size": (8 * width // 3 + 63) // 64 * 64,
        "num_attention_heads": heads,
        "num_key_value_heads": next(n for n in (3, 4, 2, 1) if heads % n == 0) if heads > 1 else 1,
        "head_dim": 64 if width >= 64 else width // 2 * 2,
    }
    if tokenizer is not None:
        fields |= {
            "tokenizer_size": len(tokenizer),
            "tokenizer_hash": vocabulary_hash(tokenizer),
            "chat_template_hash": chat_template_hash(tokenizer),
        }
    return FlashMapConfig(**(fields | overrides))

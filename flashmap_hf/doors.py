"""One call of the loop, behind both doors: `assistant_model=drafter` (hook.py), `custom_generate=decoder(drafter)`."""

import warnings
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from flashmap_hf import compatibility
from flashmap_hf.candidates import FlashMapCandidateGenerator, drafter_pass
from flashmap_hf.compiling import as_drafter
from flashmap_hf.costs import StepCost, cost_of
from flashmap_hf.decoding import generate_with_drafter
from flashmap_hf.generation_config import DraftOptions, FlashMapGenerationConfig
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.proposals import no_lattice
from flashmap_hf.statistics import Recorder
from flashmap_hf.target_steps import frequency_change, last_length, mask_obstacle


def decode(
    target: Any,  # PreTrainedModel with GenerationMixin
    drafter: FlashMapDrafter,
    options: DraftOptions,
    input_ids: torch.Tensor,  # [B, T]
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """What `generate` calls once everything is prepared: with the drafter, or plainly with a warning that says why.

    Raises:
        ValueError: the inputs or the cache do not go with a drafter; before the first forward.
    """
    batch_size, length = input_ids.shape
    compatibility.check_inputs(batch_size, length, streamer, synced_gpus, model_kwargs)
    reason = None
    if compatibility.has_guidance(logits_processor):
        reason = "guidance_scale runs the target twice per token"
    elif compatibility.has_virtual_tokens(target):
        reason = "peft inserts virtual tokens one step at a time (hand them over as a cache: examples/peft_target.py)"
    elif change := frequency_change(target, length, generation_config.max_length or length, model_kwargs):
        reason = change
    elif drafter.device.type == "meta":
        reason = "The drafter's weights are on the meta device (not loaded, or offloaded)"
    if reason is not None:
        warnings.warn(f"{reason}: decoding without the drafter.", stacklevel=4)
        result = target._sample(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer, **model_kwargs
        )
        tokens = result if isinstance(result, torch.Tensor) else result.sequences
        steps = _emitted(tokens[:, length:], generation_config)
        Recorder(target.device).add(calls=1, plain_calls=1, committed=steps, target_steps=steps)
        return result
    obstacle = mask_obstacle(target, model_kwargs["cache"], model_kwargs)
    compatibility.check_batch(batch_size, obstacle, logits_processor, model_kwargs)
    candidates = FlashMapCandidateGenerator(drafter, target, generation_config, logits_processor, options)
    tree = options.tree_size is not None or options.num_drafts > 1
    if tree and (reason := obstacle or no_lattice(candidates)) is not None:
        warnings.warn(f"Drafting a chain, not a tree: {reason}.", stacklevel=4)
    candidates.max_length = min(candidates.max_length, last_length(target, length, model_kwargs))
    cost = calibrated(candidates) if options.adaptive else None
    return generate_with_drafter(
        target, input_ids, candidates, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs,
        trees=obstacle is None, cost=cost,
    )  # fmt: skip


def _emitted(new: torch.Tensor, config: GenerationConfig) -> int:  # [B, n]
    """How many tokens a batch emitted: what follows an end token is padding."""
    ends: Any = config._eos_token_tensor
    if ends is None:
        return new.numel()
    ended = torch.isin(new, ends.to(new.device)).int()
    return int((ended.cumsum(-1) - ended == 0).sum())


def calibrated(candidates: FlashMapCandidateGenerator) -> StepCost:
    """What a step of this pair costs; measured at the first call of a process, kept for the life of both models."""
    target, drafter = candidates.target, candidates.drafter
    config, probe = drafter.config, candidates.another(torch.Generator(), LogitsProcessorList())
    taps = torch.zeros(1, config.window, len(candidates.tap_layers) * config.target_hidden_size)
    probe.context.append(taps.to(device=drafter.device, dtype=target.dtype))
    noise = [torch.zeros(config.block_size)]
    anchor = torch.zeros(1, dtype=torch.long)
    return cost_of(target, drafter, lambda: drafter_pass([probe], anchor, noise))


class Decoder:
    """A callable for `generate(custom_generate=...)`; made by `decoder`."""

    def __init__(self, drafter: FlashMapDrafter, streamer: BaseStreamer | None, options: dict[str, Any]):
        self.drafter, self.streamer = drafter, streamer
        self.config = FlashMapGenerationConfig(**options)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        compatibility.check_target(self.drafter.config, model)
        compatibility.check_call(generation_config)
        drafter = self.drafter
        own: Any = drafter.generation_config
        options = DraftOptions.resolve(
            vars(self.config), None, None, own, drafter.config.block_size, drafter.config.num_steps
        )
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        return decode(
            model, drafter, options, input_ids, logits_processor, stopping_criteria, generation_config, self.streamer,
            **model_kwargs,
        )  # fmt: skip


def decoder(drafter: Any, streamer: BaseStreamer | None = None, **options: Any) -> Decoder:
    """The loop for `model.generate(**inputs, custom_generate=flashmap_hf.decoder(drafter, ...))`.

    Args:
        drafter: a `FlashMapDrafter`, or one that peft or torch.compile has wrapped.
        streamer: `generate` keeps its own `streamer` from such a callable: give it here instead.
        options: fields of `FlashMapGenerationConfig` that concern drafting; what is not given comes from the drafter's
            generation config; what `generate` is given of them does not arrive here.

    Raises:
        ValueError: no drafter, or an option that is unknown or out of range; names it.
    """
    found = as_drafter(drafter)
    if found is None:
        raise ValueError(
            f"decoder needs a FlashMapDrafter, got {type(drafter).__name__}: FlashMapDrafter.from_pretrained."
        )
    unknown = [name for name in options if name not in DraftOptions.__dataclass_fields__]
    if unknown:
        known = ", ".join(DraftOptions.__dataclass_fields__)
        raise ValueError(f"{unknown[0]} is no option of drafting: choose from {known}; others go to generate.")
    return Decoder(found, streamer, options)

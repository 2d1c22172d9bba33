"""Baseline: a trained drafter with what a benchmark asks of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from flashmap_hf import loading
from flashmap_hf.compatibility import check_target
from flashmap_hf.evaluation.baselines.configuration import BaselineConfig
from flashmap_hf.evaluation.baselines.modeling import BaselineDrafter
from flashmap_hf.evaluation.baselines.sizing import CLASSES
from flashmap_hf.evaluation.baselines.stock_loop import assisted


@dataclass(frozen=True)
class Baseline:
    """A drafter of one of the kinds `dflash`, `eagle` and `medusa`, ready for its target."""

    drafter: BaselineDrafter

    @property
    def name(self) -> str:
        return self.drafter.config.kind

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.drafter.parameters())

    @property
    def weight_bytes(self) -> int:
        """Parameters and buffers, as loaded; what is read of the target is not counted."""
        tensors = [*self.drafter.parameters(), *self.drafter.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def state_bytes(self, context: int) -> int:
        """What is kept per request after `context` tokens, from one pass to the next."""
        return self.drafter.state_values(context) * self.drafter.dtype.itemsize

    def generate(
        self,
        target: PreTrainedModel,
        inputs: Mapping[str, torch.Tensor],
        generation_config: GenerationConfig | None = None,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' assisted `generate` with this drafter; what happened goes to `flashmap_hf.record()`.

        Args:
            target: the model that it was trained for; not changed.
            inputs: `input_ids` `[1, T]` and `attention_mask`, as for `generate`.
            generation_config, streamer, kwargs: as for `generate`.

        Returns:
            `[1, T + n]` ids, or what `return_dict_in_generate` asks for.

        Raises:
            ValueError: the drafter was made for another target.
        """
        check_target(self.drafter.config, target)
        return assisted(target).generate(
            **inputs,
            generation_config=generation_config,
            assistant_model=self.drafter,
            streamer=streamer,
            **kwargs,
        )


def load(folder: str | os.PathLike[str], target: PreTrainedModel) -> Baseline:
    """The baseline that `flashmap baselines` wrote to `folder`, in the target's dtype and on its device.

    Raises:
        OSError: a file is missing, damaged or of another kind; names it.
        ValueError: it was made for another target.
    """
    with loading.explained(folder, {}):
        config: Any = BaselineConfig.from_pretrained(folder)
        loaded: Any = CLASSES[config.kind].from_pretrained(
            folder, config=config, dtype=target.dtype, use_safetensors=True, output_loading_info=True
        )
        drafter, info = loaded
        loading.check_keys(info, {})
    check_target(config, target)
    return Baseline(drafter.to(target.device).eval())

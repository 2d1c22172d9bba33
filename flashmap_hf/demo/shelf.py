"""The pair of models that was asked for last stays loaded; every visitor uses it, none changes it."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import FlashMapDrafter, chat_template_differs, check_target, drafters, targets
from flashmap_hf.demo.controls import Controls
from flashmap_hf.demo.memory import estimate, free_bytes, gigabytes, size_of


@dataclass(frozen=True)
class Pair:
    """Two models that fit each other."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: FlashMapDrafter
    template_differs: bool  # the drafter was trained with another chat template


class Shelf:
    """Holds one pair, in one dtype on one device. One visitor at a time may call `get`."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.names: tuple[str, str] | None = None
        self.pair: Pair | None = None

    def holds(self, controls: Controls) -> bool:
        return self.pair is not None and self.names == (controls.target_name, controls.drafter_name)

    @property
    def size(self) -> int:
        """Bytes of what is held."""
        return size_of(self.pair.target) + size_of(self.pair.drafter) if self.pair else 0

    def get(self, controls: Controls) -> Pair:
        """The pair that `controls` names; what was there before is given up for it.

        Raises:
            ValueError: the two do not fit each other, or not into the memory.
            OSError: one of them cannot be found or read.
        """
        if self.pair is not None and self.holds(controls):
            return self.pair
        drafters.check(controls.drafter_name)  # the cheap mistakes first
        names = (controls.target_name, controls.drafter_name)
        if controls.target_name not in targets.EMBEDDED:
            self._check_room(controls)
        self.names = self.pair = None
        target, tokenizer = targets.load(controls.target_name, dtype=self.dtype, device=self.device)
        drafter = drafters.load(controls.drafter_name, dtype=self.dtype, device=self.device)
        check_target(drafter.config, target, tokenizer)
        self.pair = Pair(target, tokenizer, drafter, chat_template_differs(drafter.config, tokenizer))
        self.names = names
        return self.pair

    def _check_room(self, controls: Controls) -> None:
        need, free = estimate(controls, self.dtype).total, free_bytes(self.device) + self.size
        if need > free:
            raise ValueError(
                f"target and drafter need about {gigabytes(need)} and {gigabytes(free)} are free: "
                "choose a smaller target"
            )

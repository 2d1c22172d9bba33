"""Do the target and the drafter fit? How much memory is free, and about how much a race needs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig
from transformers.models.auto import AutoConfig, AutoModelForCausalLM

from flashmap_hf import FlashMapConfig, FlashMapDrafter, targets
from flashmap_hf.demo.controls import Controls

OVERHEAD = 1.2  # activations, allocator, what loading holds twice for a moment
PROMPT_TOKENS = 512  # a guess; the key-value cache is small beside the weights
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Need:
    """Bytes that one race takes: the weights of both models, the key-value caches of both sides."""

    target: int
    drafter: int
    caches: int

    @property
    def total(self) -> int:
        return int(OVERHEAD * (self.target + self.drafter + self.caches))


def free_bytes(device: torch.device) -> int:
    """What a new model may take on `device`; in a container, of what the container may have."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free


def estimate(controls: Controls, dtype: torch.dtype) -> Need:
    """From the two configurations alone; no weights are read, and a Hub id is asked for its configuration only.

    Raises:
        ValueError, OSError: a name leads nowhere, or to a configuration that is not of such a model.
    """
    drafter_config = FlashMapConfig.from_pretrained(controls.drafter_name)
    target_config = config_of(controls.target_name)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config, dtype=dtype)
        drafter: Any = FlashMapDrafter(drafter_config)
        drafter.to(dtype)
    text: Any = target_config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    tokens = PROMPT_TOKENS + controls.max_new_tokens
    caches = 2 * 2 * text.num_hidden_layers * heads * head_dim * tokens * dtype.itemsize  # keys, values; two sides
    return Need(size_of(target), size_of(drafter), caches)


def config_of(target: str) -> PreTrainedConfig:
    """The target's configuration; an embedded one is read where it was prepared.

    Raises:
        ValueError, OSError: there is none.
    """
    embedded = targets.EMBEDDED.get(target)
    path = target if embedded is None else str(targets.prepare(embedded, fetch=False))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split("Model type should be one of")[0].split())  # hundreds of names follow
        raise type(error)(f"target {target!r} cannot be read: {reason}") from error
    return config


def size_of(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers, shared ones once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

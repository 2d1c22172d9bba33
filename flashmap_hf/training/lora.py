"""Low-rank adapters on a drafter, by peft: for a fine-tuned target, or for a domain."""

from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from flashmap_hf.modeling_flashmap import FlashMapDrafter

ADAPTER = "adapter"  # the folder in a run's folder


def add_adapter(drafter: FlashMapDrafter, rank: int) -> PeftModel:
    """Adapters on every linear map of the drafter: context, layers, endpoint, and the head where it has its own.

    The drafter itself is changed in place, as peft does: the adapter's weights alone are trained.
    """
    names = [name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, lora_dropout=0.0, bias="none")
    return get_peft_model(drafter, config)


def save_adapter(adapted: PeftModel, folder: Path, base: str) -> None:
    """Write the adapter, safetensors and configuration; `base` is the drafter it belongs to."""
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(str(folder), safe_serialization=True)

"""Low-rank adapters on a drafter, by peft: for a fine-tuned target, or for a domain."""

from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from flashmap_hf.modeling_flashmap import FlashMapDrafter

ADAPTER = "adapter"  # the folder in a run's folder
CARD = """---
library_name: peft
tags: [flashmap, speculative-decoding, lora]
---

# LoRA adapter of the FlashMap drafter {base}

```python
from peft import PeftModel
from flashmap_hf import FlashMapDrafter

drafter = PeftModel.from_pretrained(FlashMapDrafter.from_pretrained("{base}"), "this folder, or its Hub id")
model.generate(**inputs, assistant_model=drafter)
```

`training.json` holds how it was trained. `drafter.merge_and_unload()` makes a plain drafter of it.
"""


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
    public = Path(base).name if Path(base).exists() else base  # a path is this machine's own
    (folder / "README.md").write_text(CARD.format(base=public), encoding="utf-8")  # in place of peft's empty form

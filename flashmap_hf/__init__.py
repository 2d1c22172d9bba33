"""FlashMap for Hugging Face: block drafters that speed up `model.generate` without changing its output law."""

from transformers.models.auto import AutoConfig, AutoModel

from flashmap_hf.candidates import FlashMapCandidateGenerator
from flashmap_hf.compatibility import chat_template_differs, check_target
from flashmap_hf.compiling import compile
from flashmap_hf.configuration_flashmap import FlashMapConfig
from flashmap_hf.doors import decoder
from flashmap_hf.generation_config import FlashMapGenerationConfig
from flashmap_hf.hook import install as _install
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.statistics import Statistics, record

__version__ = "0.1.0"

__all__ = [
    "FlashMapCandidateGenerator",
    "FlashMapConfig",
    "FlashMapDrafter",
    "FlashMapGenerationConfig",
    "Statistics",
    "chat_template_differs",
    "check_target",
    "compile",
    "decoder",
    "record",
]

AutoConfig.register("flashmap", FlashMapConfig, exist_ok=True)
AutoModel.register(FlashMapConfig, FlashMapDrafter, exist_ok=True)
_install()

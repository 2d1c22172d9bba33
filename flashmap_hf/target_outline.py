"""A target without its weights: the configuration is fetched, the modules are built on the meta device."""

import os
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flashmap_hf import targets


def outline(name: str | os.PathLike[str]) -> PreTrainedModel:
    """The modules of a target, on the meta device.

    Args:
        name: an embedded name, a folder that holds a config.json (or that file itself), or a Hub id.

    Raises:
        OSError: the configuration cannot be found or fetched; names the target and the way out.
        ValueError: it is not one of a causal language model that `transformers` has.
    """
    embedded = targets.EMBEDDED.get(str(name))
    place = source(name)
    try:
        config = AutoConfig.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        raise OSError(
            f"the configuration of target {str(name)!r} cannot be read ({first_sentence(error)}): pass an embedded "
            f"name ({', '.join(targets.EMBEDDED)}), a folder with its config.json, or a Hub id that can be reached."
        ) from error
    if embedded is not None:
        config.name_or_path = embedded.hub_id
    return build(config)


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration, on the meta device; raises ValueError as `outline` does."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        name = config.name_or_path or config.model_type
        raise ValueError(f"target {name!r} is no causal language model: {first_sentence(error)}") from error
    return model.eval()


def tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The target's tokenizer; raises OSError where it has none that can be loaded without code of its own."""
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source(name))
    except (OSError, ValueError, KeyError) as error:
        raise OSError(f"the tokenizer of target {str(name)!r} cannot be read ({first_sentence(error)})") from error
    return loaded


def source(name: str | os.PathLike[str]) -> str:
    """Where the files are: an embedded target's prepared folder, else its Hub id; any other name is itself."""
    embedded = targets.EMBEDDED.get(str(name))
    if embedded is None:
        return str(name)
    folder = targets.home() / "targets" / embedded.name
    return str(folder) if targets.is_complete(folder, embedded) else embedded.hub_id


def first_sentence(error: BaseException) -> str:
    """Of a message of transformers, which may go on for a page."""
    return " ".join(str(error).split("Model type should be one of")[0].split("\n")[0].split())[:300]


def hub_id(name: str | os.PathLike[str]) -> str | None:
    """The name of a target on the Hub; None for a folder."""
    embedded = targets.EMBEDDED.get(str(name))
    if embedded is not None:
        return embedded.hub_id
    return None if Path(name).exists() else str(name)

"""BaselineConfig: the shape of a drafter that FlashMap is compared with, and the target that it is bound to."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from flashmap_hf.configuration_flashmap import FlashMapConfig

KINDS = ("dflash", "eagle", "medusa")


@strict
class BaselineConfig(FlashMapConfig):
    """Configuration of a `BaselineDrafter`: the fields of a FlashMap drafter, of which those about noise mean nothing.

    Args:
        kind: `dflash` (a factorised block in one pass), `eagle` (features and tokens in turn, K passes) or `medusa`
            (K heads on the final hidden state, independent of each other).
        mask_token_id: what stands in the slots of `dflash`, beside the anchor.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    model_type = "flashmap-baseline"

    kind: str = "dflash"
    mask_token_id: int = 0

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in `PreTrainedConfig`, which only warns where the files are those of another kind of model.

        Raises:
            OSError: there is no config.json, or it is not a baseline's.
        """
        fields, kwargs = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)
        if fields.get("model_type") != cls.model_type:
            raise OSError(
                f"{pretrained_model_name_or_path} holds a model of type {fields.get('model_type')!r}, not a baseline: "
                "pass a folder that `flashmap baselines` wrote."
            )
        return fields, kwargs

    def _check(self) -> None:
        super()._check()
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: choose one of {', '.join(KINDS)}.")
        if self.head != "shared" or self.transition_rank is not None:
            raise ValueError("A baseline reads off the target's unembedding: head='shared', transition_rank=None.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id}: must be a token, below {self.vocab_size}.")

"""`model.generate(..., custom_generate="<this repository>", trust_remote_code=True)`: decode with this drafter."""

import functools
import sys

try:
    import flashmap_hf
except ImportError as error:
    raise ImportError(
        "This drafter needs the package flashmap_hf: install it (`pip install flashmap-hf`, or `pip install -e .` in a "
        "clone of its repository) and call generate again."
    ) from error

HUB_KEYWORDS = ("revision", "token", "cache_dir", "force_download", "local_files_only")


@functools.lru_cache(maxsize=1)
def load(repository, dtype, device, hub):
    """The drafter of this repository, kept for the next call."""
    return flashmap_hf.FlashMapDrafter.from_pretrained(repository, dtype=dtype, **dict(hub)).to(device)


def generate(model, assistant_model=None, **arguments):
    """All of `generate`'s arguments, `streamer` included. Without an `assistant_model`, this repository's drafter."""
    hub = tuple((name, arguments.pop(name)) for name in HUB_KEYWORDS if name in arguments)
    if assistant_model is None:
        # `generate` keeps to itself where this file came from: its own frame knows
        repository = str(sys._getframe(1).f_locals["custom_generate"])
        assistant_model = load(repository, model.dtype, model.device, hub)
    return model.generate(assistant_model=assistant_model, **arguments)

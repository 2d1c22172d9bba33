"""What `return_dict_in_generate` returns: collected by row and token, joined as plain generation gives it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils.output_capturing import selected_hidden_states

from flashmap_hf.emission import Emitted


@dataclass
class Collected:
    """One row's part of the result, one entry per token."""

    config: GenerationConfig
    scores: list[Any] = field(default_factory=list)  # [1, V] each
    logits: list[Any] = field(default_factory=list)
    attentions: list[Any] = field(default_factory=list)  # tuples of one tensor per layer
    hidden_states: list[Any] = field(default_factory=list)

    def add(
        self,
        outputs: Any,
        batch: int,
        emitted: Emitted,
        seen: Callable[[int], list[int]] | None,
    ) -> None:
        """The token that a place of the last forward gave to row `batch`; the prefill's states are kept whole.

        seen: the keys that a place attends to, counted from the end; None after the prefill.
        """
        config = self.config
        if not config.return_dict_in_generate:
            return
        row, place = slice(batch, batch + 1), slice(emitted.place, emitted.place + 1)
        if config.output_scores:
            self.scores.append(emitted.scores)
        if config.output_logits:
            self.logits.append(emitted.logits)
        if config.output_hidden_states:
            states = outputs.hidden_states
            if (asked := selected_hidden_states(config.output_hidden_states)) is not None:  # the taps are not
                indices = {i % len(states) for i in asked}
                states = [h if i in indices else None for i, h in enumerate(states)]
            kept = [h if h is None else h[row] if seen is None else h[row, place] for h in states]
            self.hidden_states.append(tuple(kept))
        if config.output_attentions:
            weights = [a[row] for a in outputs.attentions if a is not None]
            if seen is not None:  # keys of other branches and of later drafted tokens are not there in plain decoding
                keys = seen(emitted.place)
                # layers with a sliding window return the newest keys only
                weights = [a[:, :, place, [k for k in keys if k >= -a.shape[-1]]] for a in weights]
            self.attentions.append(tuple(weights))

    @property
    def seen_scores(self) -> tuple[torch.Tensor, ...] | None:
        """What a stopping criterion gets as `scores`."""
        config = self.config
        return tuple(self.scores) if config.return_dict_in_generate and config.output_scores else None


def result(config: GenerationConfig, rows: Sequence[Collected], sequences: torch.Tensor, cache: Any) -> Any:
    """`GenerateDecoderOnlyOutput` of all rows. Behind the end of a row that finished early its entries are zero."""

    def joined(name: str, asked: Any) -> Any:
        if not asked:
            return None
        lists = [getattr(row, name) for row in rows]
        steps = range(max(len(entries) for entries in lists))
        return tuple(_joined([entries[i] if i < len(entries) else None for entries in lists]) for i in steps)

    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=joined("scores", config.output_scores),
        logits=joined("logits", config.output_logits),
        attentions=joined("attentions", config.output_attentions),
        hidden_states=joined("hidden_states", config.output_hidden_states),
        cache=cache,
    )


def _joined(entries: list[Any]) -> Any:
    """One entry per row, None where the row has ended -> the batch's; layers one by one."""
    if len(entries) == 1:
        return entries[0]
    first = next(entry for entry in entries if entry is not None)
    if isinstance(first, tuple):
        return tuple(
            None if layer is None else _joined([None if e is None else e[i] for e in entries])
            for i, layer in enumerate(first)
        )
    width = max(entry.shape[-1] for entry in entries if entry is not None)
    whole = []
    for entry in entries:
        entry = torch.zeros_like(first) if entry is None else entry
        # keys of a row that is further on; the newest are last, as with padding on the left
        whole.append(torch.nn.functional.pad(entry, (width - entry.shape[-1], 0)))
    return torch.cat(whole)

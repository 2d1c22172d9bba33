"""The target's forward over anchors and drafted tokens, and its cache: what was refused never stays in it.

One sequence with a chain goes through the causal mask that the target makes itself. Trees, and batches whose rows
accept different numbers of tokens, go through a mask of four dimensions.
"""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.utils import ModelOutput

from flashmap_hf.few_rows import FewRows
from flashmap_hf.tree import TokenTree

MASKED_ATTENTION = ("sdpa", "eager")  # they take a mask of four dimensions as it is
LENGTHS = ("attention_mask", "position_ids", "cache", "logits_to_keep")  # what a tree step gives itself
WASTE = 1.25  # a batch's cache is packed when it is so many times longer than its longest row


def mask_obstacle(target: Any, cache: Any, model_kwargs: dict[str, Any]) -> str | None:
    """Why the target cannot verify trees or ragged batches; None where it can."""
    name = type(target).__name__
    text = target.config.get_text_config()
    implementation = getattr(text, "_attn_implementation", None)
    if implementation not in MASKED_ATTENTION:
        return f"the attention {implementation!r} of {name} takes no mask of four dimensions (sdpa and eager do)"
    if "position_ids" not in inspect.signature(target.forward).parameters or getattr(text, "alibi", False):
        return f"{name} takes no position_ids"
    # a cache that the user made may keep everything where the target's own would slide: the mask slides all the same
    layers = [*cache.layers, *DynamicCache(config=target.config).layers]
    others = [type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer]
    if others or not isinstance(cache, Cache):
        return (
            f"the cache of {name} has layers of another kind than full attention ({[*others, type(cache).__name__][0]})"
        )
    if "local" in getattr(text, "attention_layers", ()):
        return f"{name} has layers of local attention"
    if model_kwargs.get("token_type_ids") is not None:
        return "token_type_ids"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return f"{name} has position_ids of {positions.dim()} dimensions"
    return None


def seen_before(length: int, model_kwargs: dict[str, Any]) -> tuple[int, int]:
    """Positions of the shortest and of the longest row of `[B, length]` ids, with what an earlier turn left."""
    positions = model_kwargs.get("position_ids")
    if positions is None:
        return length, length
    last = positions[..., -1] + 1
    return int(last.min()), max(int(last.max()), length)


def frequency_change(target: Any, length: int, max_length: int, model_kwargs: dict[str, Any]) -> str | None:
    """Why drafted tokens would change what the target says of those before them: rotary frequencies that depend on the
    newest position of a forward. None where none of this call's do."""
    text = target.config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    shortest, longest = seen_before(length, model_kwargs)
    end = longest + max_length - length
    for rope in (parameters, *parameters.values()):  # of some targets by kind of layer
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        limit = (rope.get("original_max_position_embeddings") if kind else None) or text.max_position_embeddings
        if (kind == "longrope" and shortest <= limit < end) or (kind == "dynamic" and limit < end):
            return f"{type(target).__name__} changes its rotary frequencies behind {limit} positions"
    return None


def last_length(target: Any, length: int, model_kwargs: dict[str, Any]) -> float:
    """The length that drafted tokens may reach; plain decoding may stop before the last position that a table holds."""
    text = target.config.get_text_config()
    if getattr(text, "rope_parameters", None) is not None:
        return math.inf
    room = getattr(text, "max_position_embeddings", None) or math.inf
    return room + 1 - (seen_before(length, model_kwargs)[1] - length)


class TargetSteps:
    """The target within one call: prefill, steps, and the cache kept at what is committed but for the newest token.

    Args:
        target: a PreTrainedModel with GenerationMixin.
        model_kwargs: of the call, as `generate` prepared them.
        batch: rows of the call.
        hidden_states: the indices of hidden states that each forward returns, or True for all.
    """

    def __init__(
        self,
        target: Any,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        batch: int,
        hidden_states: Any,
    ):
        self.target, self.config = target, generation_config
        self.kwargs = model_kwargs | {"output_hidden_states": hidden_states}
        self.batch = batch  # rows that go on
        self.ragged = batch > 1  # rows of different lengths, until the end of the call
        self.fed = 0  # places of the last forward, the prefill excepted
        self.open = False  # whether the cache holds places of it that nobody has decided about
        self.call: Callable[..., ModelOutput] = target.__call__
        self.products = FewRows(target)
        self.valid = torch.empty(0)  # [B, L] bool: the keys in the cache that count (batches only)
        self.next_position = torch.empty(0)  # [B]: of the anchor (batches only)

    def prefill(self, input_ids: torch.Tensor) -> ModelOutput:  # [B, T]
        """The prompt's forward.

        Raises:
            ValueError: the target's cache cannot be rolled back.
        """
        if self.ragged:  # rows will leave it: an empty one of the user's stays as it is
            self.kwargs["cache"] = _copied(self.kwargs["cache"])
        outputs = self.target._prefill(input_ids, self.config, self.kwargs)
        self.cache = outputs.cache
        if not self.cache.is_croppable:
            raise ValueError(
                f"The cache of {type(self.target).__name__} cannot be rolled back (a recurrent state): "
                "generate without the drafter."
            )
        # only now: recording during the prefill would keep what a sliding window is there to drop
        self.cache.activate_past_recording()
        if self.target._valid_auto_compile_criteria(self.kwargs, self.config):
            self.call = self.target.get_compiled_call(self.config.compile_config)
        self.prompt = length = self.length
        if self.ragged:
            mask, positions = self.kwargs.get("attention_mask"), self.kwargs.get("position_ids")
            ones = torch.ones(self.batch, length, dtype=torch.bool, device=input_ids.device)
            self.valid = ones if mask is None else mask[:, :length].bool()
            self.next_position = self.valid.sum(-1) if positions is None else positions[:, -1] + 1
        return outputs

    @property
    def length(self) -> int:
        """Keys in the cache of one sequence."""
        return self.cache.get_seq_length()

    def forward(self, input_ids: Sequence[torch.Tensor], trees: Sequence[TokenTree]) -> ModelOutput:
        """Verify one tree per row. input_ids: `[1, T_r]` of each; logits of all `1 + N` places come back."""
        self.fed = 1 + max(len(tree) for tree in trees)
        with self.target._optimize_model_for_decode(), self.products.applied():
            if not self.ragged and trees[0].is_chain:
                tokens = torch.tensor(trees[0].tokens, dtype=torch.long, device=input_ids[0].device)
                outputs = self._chain(input_ids[0], tokens)
            else:
                outputs = self._tree(input_ids, trees)
        self.open = True
        return outputs

    def _chain(self, input_ids: torch.Tensor, tokens: torch.Tensor) -> ModelOutput:  # [1, T], [k]
        candidates = torch.cat([input_ids, tokens[None]], dim=1)
        size, kwargs = len(tokens), dict(self.kwargs)
        # with a cache from an earlier turn these may be longer than the ids
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs = _prepare_attention_mask(kwargs, mask.shape[1] + size, False)
        if (types := kwargs.get("token_type_ids")) is not None:
            kwargs = _prepare_token_type_ids(kwargs, types.shape[1] + size)
        if (positions := kwargs.get("position_ids")) is not None and size > 0:
            kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + size, False)
        inputs = self.target.prepare_inputs_for_generation(
            candidates, next_sequence_length=size + 1, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = size + 1
        return self.call(**inputs, return_dict=True)

    def _tree(self, input_ids: Sequence[torch.Tensor], trees: Sequence[TokenTree]) -> ModelOutput:
        device, length = input_ids[0].device, self.length
        width = self.fed
        if not self.ragged:
            mask, positions = self.kwargs.get("attention_mask"), self.kwargs.get("position_ids")
            valid = mask[:, :length].bool() if mask is not None else torch.ones(1, length, dtype=torch.bool)
            first = positions[:, -1] if positions is not None else torch.tensor([length])
        else:
            valid, first = self.valid, self.next_position
        tokens = torch.tensor(
            [
                [int(ids[0, -1]), *tree.tokens, *[0] * (width - 1 - len(tree))]
                for ids, tree in zip(input_ids, trees, strict=True)
            ]
        )
        depths = torch.tensor([[0, *tree.depths, *[0] * (width - 1 - len(tree))] for tree in trees])
        among = torch.zeros(len(trees), width, width, dtype=torch.bool)
        among[:, :, 0] = True  # what fills a shorter row up sees the anchor alone; nothing sees it
        for row, tree in zip(among, trees, strict=True):
            row[: len(tree) + 1, : len(tree) + 1] = tree.mask()
        past = valid.to(device)[:, None].expand(-1, width, -1)
        whole = torch.cat([past, among.to(device)], dim=-1)[:, None]  # [B, 1, 1 + N, L + 1 + N]
        if self.target.config.get_text_config()._attn_implementation == "eager":  # it adds the mask to the scores
            dtype = self.target.dtype
            whole = torch.zeros(whole.shape, dtype=dtype, device=device).masked_fill_(~whole, torch.finfo(dtype).min)
        inputs = self.target.prepare_inputs_for_generation(
            tokens.to(device),
            next_sequence_length=width,
            is_first_iteration=False,
            attention_mask=whole,
            position_ids=(first[:, None].to(depths.device) + depths).to(device),
            cache=self.cache,
            **{name: value for name, value in self.kwargs.items() if name not in LENGTHS},
        )
        if "logits_to_keep" in self.kwargs:
            inputs["logits_to_keep"] = width
        return self.target(**inputs, return_dict=True)

    def seen(self, batch: int, tree: TokenTree, place: int) -> list[int]:
        """The keys that `place` of the last forward attended to, oldest first, from the end. Before `commit`."""
        before = self.length - self.fed
        new = [before, *(before + 1 + node for node in tree.path(place - 1))]
        if not self.ragged:
            old = list(range(before))
        else:  # padding on the left is a key of plain decoding, too
            kept = self.valid[batch, self.prompt :].nonzero()[:, 0] + self.prompt
            old = [*range(self.prompt), *kept.tolist()]
        return [key - self.length for key in (*old, *new)]

    # what stays in the cache

    def commit(self, outputs: ModelOutput, places: Sequence[Sequence[int]]) -> None:
        """Keep what each row committed: places of the last forward, the anchor (0) first; nothing after the prefill.

        The cache of one sequence then holds every committed token but the newest. In a batch the rows that kept fewer
        places than the longest have holes, which the mask leaves out until `pack` removes them.
        """
        if self.ragged:
            kept = max(len(row) for row in places)
            self._gather(places, kept)
            there = torch.arange(kept) < torch.tensor([[len(row)] for row in places])
            self.valid = torch.cat([self.valid, there.to(self.valid.device)], dim=1)
            self.next_position = self.next_position + there.sum(-1).to(self.next_position.device)
            self._pack()
            return
        kept = len(places[0])
        if self.fed:
            self._gather(places, kept)
        self.kwargs = self.target._update_model_kwargs_for_generation(outputs, self.kwargs, num_new_tokens=max(kept, 1))

    def _gather(self, places: Sequence[Sequence[int]], kept: int) -> None:
        """Move the kept places of each row to the front of what the last forward appended, and crop the rest."""
        if any(list(row) != list(range(len(row))) for row in places):
            index = torch.tensor([[*row, *[0] * (kept - len(row))] for row in places], dtype=torch.long)
            index = index[:, None, :, None]
            for layer in self.cache.layers:
                for states in (layer.keys, layer.values):
                    new = states[:, :, -self.fed :]
                    size = (-1, states.shape[1], -1, states.shape[3])
                    chosen = new.gather(2, index.to(states.device).expand(*size))
                    new[:, :, :kept] = chosen
        self.cache.crop(kept - self.fed)
        self.open = False

    def abandon(self, places: Sequence[Sequence[int]]) -> None:
        """Something was raised in the middle: the cache keeps what was committed, as plain decoding leaves it."""
        if self.open and not self.ragged:
            self._gather(places, len(places[0]))
        self.finish()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(rows, device=self.valid.device)
        self.cache.batch_select_indices(index)
        self.valid, self.next_position = self.valid[index], self.next_position[index]
        self.batch = len(rows)

    def _pack(self) -> None:
        """Close the holes once they are a good part of the cache: a copy then costs less than attending to them."""
        longest = int(self.valid.sum(-1).max())
        if self.config.output_attentions or self.length <= WASTE * longest + 16:
            return
        order = self.valid.int().argsort(dim=-1, stable=True)[:, -longest:]  # holes first, then keys in their order
        self.valid = self.valid.gather(1, order)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                index = order.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                setattr(layer, name, states.gather(2, index))

    def finish(self) -> None:
        """Leave the user's cache as plain decoding would: the next prefill may drop what a sliding window drops."""
        for layer in self.cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.record_past = False


def _copied(cache: Any) -> Any:
    """A cache of the same kind beside an empty one."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other

"""A key-value cache whose rows come and go while a batch is decoded.

The rows end at the same column: shorter ones have padding on their left, which the attention mask hides. A new token
goes into a spare column, a new row into a free slot, and the last row into the slot of one that leaves: the rows that
stay are hardly ever copied.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

SPARE = 64  # columns that a new buffer has left: so many tokens until the next one


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer: `[rows, heads, columns, head size]`, the first slots and last columns of a buffer.

    With a `window` the attention sees the last `window - 1` columns and the new ones, as in transformers' own layer.
    """

    def __init__(self, window: int | None = None):
        super().__init__()
        self.window = window
        self.is_sliding = window is not None
        self.length = 0  # columns, those behind the window included
        self.rows = 0
        self.end = 0  # the column of the buffers after the newest token
        self.buffers: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.rows, self.is_initialized = key_states.device, key_states.shape[0], True
        self.buffers = tuple(s.new_empty(*s.shape[:2], 0, s.shape[3]) for s in (key_states, value_states))

    def held(self, length: int) -> int:
        """How many of `length` columns are kept."""
        return length if self.window is None else min(length, self.window - 1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        self._reserve(self.rows, self.held(self.length), new)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, self.end : self.end + new] = states
        first = self.end - self.held(self.length)
        self.length, self.end = self.length + new, self.end + new
        self.keys, self.values = (buffer[: self.rows, :, first : self.end] for buffer in self.buffers)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.held(self.length)
        return held + query_length, self.length - held

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def keep(self, order: Sequence[int], length: int) -> None:
        """Row i becomes what row `order[i]` was; the columns before the last `length` are dropped."""
        if not self.is_initialized:
            return
        moved = [i for i, old in enumerate(order) if i != old]
        if moved:
            columns = slice(self.end - self.held(self.length), self.end)
            to, old = (torch.tensor(rows, device=self.device) for rows in (moved, [order[i] for i in moved]))
            for buffer in self.buffers:
                buffer[to, :, columns] = buffer[old, :, columns]
        self.rows, self.length = len(order), length

    def join(self, other: "RowLayer") -> None:
        """Append the rows of `other`."""
        if not other.is_initialized:
            return
        length, first = max(self.length, other.length), self.rows
        own, new, all_held = self.held(self.length), other.held(other.length), self.held(length)
        self._reserve(first + other.rows, all_held, 0)
        for buffer, source in zip(self.buffers, other.buffers, strict=True):
            buffer[:first, :, self.end - all_held : self.end - own] = 0  # padding is hidden, but must not be NaN
            rows = buffer[first : first + other.rows]
            rows[:, :, self.end - all_held : self.end - new] = 0
            rows[:, :, self.end - new : self.end] = source[: other.rows, :, other.end - new : other.end]
        self.rows, self.length = first + other.rows, length

    def _reserve(self, rows: int, left: int, right: int) -> None:
        """Make sure of `rows` slots, `left` columns before the end and `right` after it."""
        slots, _, columns, _ = self.buffers[0].shape
        if rows <= slots and left <= self.end and self.end + right <= columns:
            return
        held = self.held(self.length)
        fresh = []
        for buffer in self.buffers:
            larger = buffer.new_empty(max(rows, slots), buffer.shape[1], left + right + SPARE, buffer.shape[3])
            larger[: self.rows, :, left - held : left] = buffer[: self.rows, :, self.end - held : self.end]
            fresh.append(larger)
        self.buffers, self.end = tuple(fresh), left


def row_cache(config: PreTrainedConfig) -> DynamicCache | None:
    """An empty cache for a target with this config; None where a layer keeps anything but a row of keys and values."""
    config = config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if getattr(config, "attention_chunk_size", None) is not None:  # chunks are counted in columns
        return None
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = RowLayer()
        elif type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1:
            cache.layers[index] = RowLayer(layer.sliding_window)
        elif type(layer) is not DummyLayer:
            return None
    return cache


def keep_rows(cache: DynamicCache, order: Sequence[int], length: int) -> None:
    """Keep the rows `order`, which differ from 0, 1, 2, ... only where a last row fills a hole."""
    for layer in cache.layers:
        if isinstance(layer, RowLayer):
            layer.keep(order, length)


def join_rows(cache: DynamicCache, other: DynamicCache) -> None:
    """Append the rows of `other`."""
    for layer, new in zip(cache.layers, other.layers, strict=True):
        if isinstance(layer, RowLayer) and isinstance(new, RowLayer):
            layer.join(new)

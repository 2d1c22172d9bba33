"""Endpoint -> draft logits: the target's unembedding (whole, or a draft vocabulary of it), or an own low-rank head.

A transition, where the drafter has one, biases a position's logits by the token drafted before it.
"""

import torch
from torch import nn

from flashmap_hf import few_rows
from flashmap_hf.configuration_flashmap import FlashMapConfig


def unembedding_rows(output_embeddings: nn.Module, ids: torch.Tensor | int, hidden_size: int) -> torch.Tensor:
    """Rows of the target's unembedding, read where its weight is all it does, else found by calling the module.

    It is called where the weight is offloaded, packed as integers, or adapted by peft; torchao and quanto dequantise.

    Args:
        output_embeddings: the target's `[D] -> [V]` map.
        ids: `[N]` rows to return; an integer means the first so many, without a copy where possible.
        hidden_size: D.

    Returns:
        `[N, D]`, no gradient.
    """
    with torch.no_grad():
        weight = readable_weight(output_embeddings, hidden_size)
        if weight is not None:
            return weight[:ids] if isinstance(ids, int) else weight[ids.to(weight.device)]
        parameter = next(output_embeddings.parameters(), torch.empty(0))  # a packed quantised weight is no parameter
        dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
        device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
        rows = slice(ids) if isinstance(ids, int) else ids.to(device)
        columns = [  # 64 unit vectors at a time: the full product would be D x V at once
            output_embeddings(block)[:, rows] for block in torch.eye(hidden_size, dtype=dtype, device=device).split(64)
        ]
        bias = output_embeddings(torch.zeros(1, hidden_size, dtype=dtype, device=device))[:, rows]
        return (torch.cat(columns) - bias).t().contiguous()


def readable_weight(output_embeddings: nn.Module, hidden_size: int) -> torch.Tensor | None:
    """`[V, D]` where the module is a product with its `weight`, dequantised; None where it has to be called."""
    weight = getattr(output_embeddings, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.device.type == "meta" or not weight.is_floating_point():
        return None
    if type(weight).dequantize is not torch.Tensor.dequantize:  # torchao's and quanto's tensors, a dtype in name only
        return weight.dequantize()
    if type(weight) not in (torch.Tensor, nn.Parameter):  # distributed, or packed in another way
        return None
    if not isinstance(output_embeddings, nn.Linear):
        # peft's wrappers pass on a `weight` that may not be all they apply: one product tells
        probe = torch.linspace(-1, 1, hidden_size, dtype=weight.dtype, device=weight.device)[None]
        bias = getattr(output_embeddings, "bias", None)
        if not torch.equal(output_embeddings(probe), nn.functional.linear(probe, weight, bias)):
            return None
    return weight.detach()


class Transition(nn.Module):
    """`B silu(A[y_(k-1)] + C z_1_k)`: A `[N + 1, r]`, its last row for tokens outside of the draft vocabulary."""

    def __init__(self, width: int, rank: int, size: int):
        super().__init__()
        self.previous = nn.Embedding(size + 1, rank)
        self.endpoint = nn.Linear(width, rank, bias=False)
        self.readout = nn.Linear(rank, size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both inputs of the silu start with unit scale for endpoints of unit RMS; B is zero: no bias at all."""
        nn.init.normal_(self.previous.weight)
        nn.init.normal_(self.endpoint.weight, std=self.endpoint.in_features**-0.5)
        nn.init.zeros_(self.readout.weight)

    def forward(self, z_1: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:  # [..., D], [...] -> [..., N]
        return self.readout(nn.functional.silu(self.previous(previous) + self.endpoint(z_1)))


class DraftHead(nn.Module):
    """Reads draft logits off the endpoint. The shared head stores nothing of the target: its rows are passed in."""

    draft_vocab_ids: torch.Tensor

    def __init__(self, config: FlashMapConfig):
        super().__init__()
        size = config.draft_vocab_size or config.num_proposable
        self.restricted = config.draft_vocab_size is not None
        self.size = size
        self.vocab_size = config.vocab_size
        self.readout_scale = nn.Parameter(torch.ones(config.target_hidden_size))
        if self.restricted:
            self.register_buffer("draft_vocab_ids", torch.arange(size), persistent=True)
        self.low_rank = config.head == "low_rank"
        if self.low_rank:
            assert config.head_rank is not None  # held by the config's validation
            self.down = nn.Linear(config.target_hidden_size, config.head_rank, bias=False)
            self.up = nn.Linear(config.head_rank, size, bias=False)
        rank = config.transition_rank
        self.transition = None if rank is None else Transition(config.target_hidden_size, rank, size)

    @property
    def ids(self) -> torch.Tensor:
        """`[N]` target ids of the logits, in order."""
        if self.restricted:
            return self.draft_vocab_ids
        return torch.arange(self.size, device=self.readout_scale.device)

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Positions in the draft vocabulary -> ids of the target, any shape."""
        return self.draft_vocab_ids[tokens] if self.restricted else tokens

    def draft_positions(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the target -> positions in the draft vocabulary, N for an id outside of it; any shape.

        Args:
            token_ids: int64, in [0, vocab_size).
        """
        if not self.restricted:
            return token_ids.clamp(max=self.size)
        table = torch.full((self.vocab_size,), self.size, device=self.draft_vocab_ids.device)
        table[self.draft_vocab_ids] = torch.arange(self.size, device=table.device)
        return table[token_ids]

    def biased(self, logits: torch.Tensor, z_1: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Marginal logits -> logits given the token before each position; as they are without a transition.

        One position of a walk (`...` empty) or whole blocks with known tokens (`[B, K]`: teacher forcing) alike;
        nothing larger than the logits is made.

        Args:
            logits: `[..., N]`, from `forward`.
            z_1: `[..., D]`, the endpoints they were read off.
            previous: `[...]` positions in the draft vocabulary (`draft_positions`); the anchor's at the first slot.

        Returns:
            `[..., N]`, in the wider dtype of `logits` and the weights.
        """
        return logits if self.transition is None else logits + self.transition(z_1, previous)

    def forward(self, z_1: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Marginal logits, without the transition.

        z_1: `[B, K, D]`; rows: `[N, D]` of the target's unembedding (None for the low-rank head) -> `[B, K, N]`.
        """
        scaled = z_1 * self.readout_scale
        if self.low_rank:
            return self.up(self.down(scaled))
        assert rows is not None
        return few_rows.linear(scaled, rows)

"""Endpoint -> draft logits: the target's unembedding (whole, or a draft vocabulary of it), or an own low-rank head."""

import torch
from torch import nn

from flashmap_hf.configuration_flashmap import FlashMapConfig


def unembedding_rows(output_embeddings: nn.Module, ids: torch.Tensor | int, hidden_size: int) -> torch.Tensor:
    """Rows of the target's unembedding; where the weight cannot be read (offloaded, quantised) by calling the module.

    Args:
        output_embeddings: the target's `[D] -> [V]` map.
        ids: `[N]` rows to return; an integer means the first so many, without a copy where possible.
        hidden_size: D.

    Returns:
        `[N, D]`, no gradient.
    """
    weight = getattr(output_embeddings, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.device.type != "meta" and weight.is_floating_point():
        return weight.detach()[:ids] if isinstance(ids, int) else weight.detach()[ids.to(weight.device)]
    with torch.no_grad():
        parameter = next(output_embeddings.parameters(), torch.empty(0))  # a packed quantised weight is no parameter
        dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
        device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
        rows = slice(ids) if isinstance(ids, int) else ids.to(device)
        columns = [  # 64 unit vectors at a time: the full product would be D x V at once
            output_embeddings(block)[:, rows] for block in torch.eye(hidden_size, dtype=dtype, device=device).split(64)
        ]
        bias = output_embeddings(torch.zeros(1, hidden_size, dtype=dtype, device=device))[:, rows]
        return (torch.cat(columns) - bias).t().contiguous()


class DraftHead(nn.Module):
    """Reads draft logits off the endpoint. The shared head stores nothing of the target: its rows are passed in."""

    draft_vocab_ids: torch.Tensor

    def __init__(self, config: FlashMapConfig):
        super().__init__()
        size = config.draft_vocab_size or config.num_proposable
        self.restricted = config.draft_vocab_size is not None
        self.size = size
        self.readout_scale = nn.Parameter(torch.ones(config.target_hidden_size))
        if self.restricted:
            self.register_buffer("draft_vocab_ids", torch.arange(size), persistent=True)
        self.low_rank = config.head == "low_rank"
        if self.low_rank:
            assert config.head_rank is not None  # held by the config's validation
            self.down = nn.Linear(config.target_hidden_size, config.head_rank, bias=False)
            self.up = nn.Linear(config.head_rank, size, bias=False)

    @property
    def ids(self) -> torch.Tensor:
        """`[N]` target ids of the logits, in order."""
        if self.restricted:
            return self.draft_vocab_ids
        return torch.arange(self.size, device=self.readout_scale.device)

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Positions in the draft vocabulary -> ids of the target, any shape."""
        return self.draft_vocab_ids[tokens] if self.restricted else tokens

    def forward(self, z_1: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """z_1: `[B, K, D]`; rows: `[N, D]` of the target's unembedding (None for the low-rank head) -> `[B, K, N]`."""
        scaled = z_1 * self.readout_scale
        if self.low_rank:
            return self.up(self.down(scaled))
        assert rows is not None
        return nn.functional.linear(scaled, rows)

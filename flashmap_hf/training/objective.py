"""A batch of blocks -> the sums of its losses: the module that is trained, and that accelerate wraps."""

import torch
from torch import nn

from flashmap_hf.flow import interpolate
from flashmap_hf.modeling_flashmap import Context, FlashMapDrafter
from flashmap_hf.training.blocks import BlockBatch, Draws
from flashmap_hf.training.losses import LossSums, block_losses
from flashmap_hf.training.tied_transition import TiedTransition


def shared_context(drafter: FlashMapDrafter, batch: BlockBatch, window: int) -> tuple[Context, torch.Tensor]:
    """The context of all blocks, computed once per position of a run.

    Returns:
        the newest state `[S * A, 1, H]`, and per layer `[S * A, Hkv, W, head_dim]` twice; and the mask `[S * A, W]`.
    """
    span = batch.taps.shape[1]
    whole = drafter.context(batch.taps, torch.arange(span, device=batch.taps.device)[None])

    def windows(x: torch.Tensor) -> torch.Tensor:  # [S, Hkv, span, h] -> [S * A, Hkv, W, h]
        return x.unfold(2, window, 1).permute(0, 2, 1, 4, 3).flatten(0, 1)

    newest = whole.states[:, window - 1 :].flatten(0, 1).unsqueeze(1)
    context = Context(newest, [(windows(k), windows(v)) for k, v in whole.keys_values])
    return context, batch.taps_mask.unfold(1, window, 1).flatten(0, 1)


class BlockObjective(nn.Module):
    """The losses of `drafter`; `embeddings` and `unembedding` are the target's `[V, D]` matrices, not trained."""

    def __init__(
        self,
        drafter: FlashMapDrafter,
        embeddings: torch.Tensor,
        unembedding: torch.Tensor,
        position_decay: float,
        kl: bool = False,
    ):
        super().__init__()
        self.drafter = drafter
        self.position_decay, self.kl = position_decay, kl
        # plain attributes: buffers would be saved with the model and broadcast at every step
        self.embeddings, self.unembedding = embeddings, unembedding
        self.representations = unembedding * unembedding.square().mean(-1, keepdim=True).rsqrt()  # x_1 of each token
        self.read_draft_vocabulary()

    def read_draft_vocabulary(self) -> None:
        """Rows of the readout and the place of each token in it, from the ids that the drafter holds now.

        A tied transition reads the same rows.
        """
        ids = self.drafter.head.ids.to(self.unembedding.device)
        self.rows = self.unembedding[ids].contiguous()
        self.to_draft = torch.full((self.unembedding.shape[0],), -100, device=ids.device)
        self.to_draft[ids] = torch.arange(len(ids), device=ids.device)
        if isinstance(self.drafter.head.transition, TiedTransition):
            self.drafter.head.transition.bind(self.embeddings[ids], self.rows)

    def logits(self, endpoint: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:  # [B, K, D], [B, K] -> [B, K, N]
        """As `head.biased(head(endpoint, rows), ...)`; a tied bias shares the head's product."""
        head = self.drafter.head
        if isinstance(head.transition, TiedTransition) and not head.low_rank:
            shift = head.transition.shift(endpoint, head.draft_positions(previous))
            return nn.functional.linear(endpoint * head.readout_scale + shift, self.rows)
        logits = head(endpoint, self.rows)
        return head.biased(logits, endpoint, head.draft_positions(previous))

    def forward(self, batch: BlockBatch, draws: Draws) -> LossSums:
        """Draft every block of the batch at the drawn times and noises, and compare with its labels."""
        drafter, config = self.drafter, self.drafter.config
        quantile = config.coupling == "quantile"
        runs, run = batch.anchors.shape
        context, mask = shared_context(drafter, batch, config.window)
        labels, exists = batch.labels.flatten(0, 1), batch.labels_mask.flatten(0, 1)
        u, s = draws.u.flatten(0, 1), draws.s.flatten()
        noise = None if draws.noise is None else draws.noise.flatten(0, 1)
        x_1 = self.representations[labels]
        z_0 = drafter.prior(u, noise, *labels.shape)
        z = interpolate(z_0, x_1, s)
        positions = config.window + torch.arange(run, device=labels.device).repeat(runs)
        anchors = batch.anchors.flatten()
        endpoint = drafter.endpoint(z, s, u if quantile else None, self.embeddings[anchors], positions, context, mask)
        logits = self.logits(endpoint, torch.cat([anchors[:, None], labels[:, :-1]], dim=1))
        target_logits = open_noise = None
        if self.kl:
            law = nn.functional.linear(batch.final, self.rows)  # [S, A + K - 1, N]
            target_logits = law.unfold(1, config.block_size, 1).permute(0, 1, 3, 2).flatten(0, 1)
            open_noise = ~batch.sampled.flatten() | u.isnan().any(-1)
        draft_labels = self.to_draft[labels].masked_fill(~exists, -100)
        return block_losses(
            logits, endpoint, z, s, z_0, x_1, draft_labels, exists, self.position_decay, target_logits, open_noise
        )

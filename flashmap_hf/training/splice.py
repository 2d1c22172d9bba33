"""`flashmap splice`: is the coupling learnt? Positions of two drafts are put together and compared with one draft.

A block drafted from the noise u is right at position k more often than what a second draft says there, if the network
reads the noise of the earlier positions: the second draft has the same u_k and other noise before it. Where the two are
equally often right, every position is drafted by itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashmap_hf import targets
from flashmap_hf.compatibility import check_target
from flashmap_hf.devices import default_device
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.options import option
from flashmap_hf.provenance import write_record
from flashmap_hf.training.blocks import make_batch
from flashmap_hf.training.held_out import draft_run
from flashmap_hf.training.objective import BlockObjective
from flashmap_hf.training.sources import FeatureSource, split, stored_features
from flashmap_hf.training.train import matrices


@dataclass(frozen=True)
class Options:
    """What `flashmap splice` can be told."""

    drafter: str = option(help="folder or Hub id")
    features: list[Path] = option(help="folders of `flashmap features` with sampled answers")
    out: Path = option(help="the JSON file")
    target: str = option(targets.SMOLLM2.name, "an embedded target, a folder or a Hub id")
    held_out: int = option(64, "as in training: the answers that no block was taken from; 0: all of them")
    seed: int = option(0, "of the noise")


def main(options: Options) -> None:
    device = default_device()
    target, tokenizer = targets.load(options.target, dtype=torch.float32, device=device)
    drafter = FlashMapDrafter.from_pretrained(options.drafter, dtype=torch.float32).to(device)
    check_target(drafter.config, target, tokenizer)
    if drafter.config.coupling != "quantile" or drafter.config.block_size < 2:
        raise ValueError(f"{options.drafter} has no coupling to show: it needs coupling='quantile' and two positions.")
    source: FeatureSource = stored_features(
        options.features, target.config.name_or_path or "", target.config.get_text_config().hidden_size
    )
    if options.held_out:
        source = split(source, options.held_out)[1]
    objective = BlockObjective(drafter, *matrices(target, drafter.config), position_decay=1.0)
    positions = splice(objective, source, options.seed)
    if not positions:
        raise ValueError(
            f"No sampled answer among {', '.join(map(str, options.features))}: there is no noise to splice."
        )
    write_record(options.out, {"drafter": Path(options.drafter).name, "answers": len(source), "positions": positions})
    for row in positions:
        print(
            f"position {row['position']}: right {row['own']:.3f} in its own draft, {row['spliced']:.3f} spliced, "
            f"{row['hidden']:.3f} with the noise hidden ({row['blocks']} blocks)"
        )


@torch.inference_mode()
def splice(objective: BlockObjective, source: FeatureSource, seed: int) -> list[dict[str, Any]]:
    """Positions 2..K: over the blocks of sampled answers that are right before it, the share right at this one.

    own: in the same draft. spliced: in a draft with other noise before this position, the same at and after it.
    hidden: in a draft that sees no noise.
    """
    size = objective.drafter.config.block_size
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(size, 4)  # blocks, own, spliced, hidden
    for index in range(len(source)):
        sequence = source[index]
        if not sequence.sampled:
            continue
        count = len(sequence.tokens) - sequence.first - 1
        window = objective.drafter.config.window
        batch = make_batch([sequence], [sequence.first], count, window, size).to(objective.rows.device)
        spread, other = torch.rand(2, count, size, generator=generator).to(objective.rows.device)
        labels = batch.labels[0].masked_fill(~batch.labels_mask[0], -1)
        u = batch.f_left[0] + spread * (batch.f_right - batch.f_left)[0]
        right = draft_run(objective, batch, u) == labels
        hidden = draft_run(objective, batch, torch.full_like(u, torch.nan)) == labels
        for k in range(1, size):
            reached = right[:, :k].all(-1) & (labels[:, k] >= 0)
            spliced = draft_run(objective, batch, torch.cat([other[:, :k], u[:, k:]], dim=1)) == labels
            rows = [reached, *(reached & found[:, k] for found in (right, spliced, hidden))]
            counts[k] += torch.stack([row.sum() for row in rows]).cpu()
    return [
        {
            "position": k + 1,
            "blocks": int(blocks),
            "own": own / blocks,
            "spliced": spliced / blocks,
            "hidden": hid / blocks,
        }
        for k, (blocks, own, spliced, hid) in enumerate(counts.tolist())
        if blocks
    ]

"""The decoding loop: draft, verify in one target forward, commit token by token, stop where plain would; any batch."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils.output_capturing import selected_hidden_states

from flashmap_hf.candidates import NOTHING, Draft, FlashMapCandidateGenerator, drafter_pass
from flashmap_hf.collected import Collected, result
from flashmap_hf.costs import StepCost
from flashmap_hf.emission import emit
from flashmap_hf.pace import Pace
from flashmap_hf.proposals import Proposals, cut, plan, wanting
from flashmap_hf.row_processors import processors_of
from flashmap_hf.statistics import Recorder
from flashmap_hf.target_steps import TargetSteps


class Noise:
    """One uniform number per new position, drawn once: a draft that was refused has already seen the later ones."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.u = torch.empty(0, dtype=torch.float64)
        self.generator = generator

    def at(self, start: int, count: int) -> torch.Tensor:  # -> [count] in [0, 1)
        if (missing := start + count - len(self.u)) > 0:
            self.u = torch.cat([self.u, torch.rand(missing, dtype=torch.float64, generator=self.generator)])
        return self.u[start : start + count]


@dataclass
class Row:
    """One sequence of the call."""

    index: int  # in the batch that was asked for
    input_ids: torch.Tensor  # [1, T]
    processors: Any  # LogitsProcessorList
    proposals: Proposals
    noise: Noise | None
    generator: torch.Generator | None
    collected: Collected
    draft: Draft = NOTHING
    finished: bool = False
    places: list[int] = field(default_factory=list)  # of the last forward that are kept, the anchor first

    def noise_at(self, prompt: int, count: int) -> torch.Tensor | None:  # -> [count]
        start = self.input_ids.shape[1] - prompt
        return None if self.noise is None else self.noise.at(start, count)


def generate_with_drafter(
    target: Any,  # PreTrainedModel with GenerationMixin
    input_ids: torch.Tensor,  # [B, T]
    candidates: FlashMapCandidateGenerator,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
    trees: bool = True,
    cost: StepCost | None = None,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode. The law of each row is the target's own; greedy output equals plain greedy output in exact arithmetic.

    Args:
        trees: whether the target can verify trees (a batch needs it).
        cost: what forwards cost, for calls that adapt; None: every step verifies what the options say.

    Returns:
        `[B, T + n]` ids, or a `GenerateDecoderOnlyOutput` as `return_dict_in_generate` asks.

    Raises:
        ValueError: the target's cache cannot be rolled back.
    """
    recorder = Recorder(target.device)
    recorder.add(calls=1)
    batch, prompt = input_ids.shape
    hidden_states: Any = generation_config.output_hidden_states
    if hidden_states is not True:
        hidden_states = [*(selected_hidden_states(hidden_states) or []), *candidates.tap_layers]
    steps = TargetSteps(target, generation_config, model_kwargs, batch, hidden_states)
    with recorder.timed("seconds_target"), recorder.timed("seconds_prefill"):
        outputs: Any = steps.prefill(input_ids)
    rows = _rows(input_ids, candidates, logits_processor, generation_config, trees, cost)
    live = list(rows)
    _observe_prompt(live, outputs, model_kwargs.get("attention_mask"), candidates.tap_layers[-1])
    try:
        while True:
            prefill = not steps.fed
            for i, row in enumerate(live):
                logits = outputs.logits[i, -1 - len(row.draft.tree) :] if batch == 1 else outputs.logits[i]
                committed = _commit(row, i, outputs, logits, steps, stopping_criteria, prefill, prompt, recorder)
                if streamer is not None:
                    streamer.put(row.input_ids[0, -committed:].cpu())
            steps.commit(outputs, [[] if prefill else row.places for row in live])
            going = [i for i, row in enumerate(live) if not row.finished]
            if not prefill:
                for i in going:
                    _observe(live[i], outputs, i)
            del outputs
            if not going:
                break
            if len(going) < len(live):
                steps.keep_rows(going)
                live = [live[i] for i in going]
            with recorder.timed("seconds_drafter"):
                passes = _draft(live, prompt)
            recorder.add(blocks=passes)
            with recorder.timed("seconds_target"):
                outputs = steps.forward([row.input_ids for row in live], [row.draft.tree for row in live])
    except BaseException:  # of a streamer, a criterion, a processor, the keyboard
        steps.abandon([row.places for row in live])
        raise
    recorder.add(plain_calls=int(not any(row.proposals.candidates.working for row in rows)))
    steps.finish()
    if streamer is not None:
        streamer.end()
    sequences = _padded(rows, generation_config)
    if generation_config.return_dict_in_generate:
        cache = steps.cache if batch == 1 else None  # rows that ended are gone from a batch's
        return result(generation_config, [row.collected for row in rows], sequences, cache)
    return sequences


def _rows(
    input_ids: torch.Tensor,
    candidates: FlashMapCandidateGenerator,
    logits_processor: LogitsProcessorList,
    config: GenerationConfig,
    trees: bool,
    cost: StepCost | None,
) -> list[Row]:
    """A row's generator makes its tokens its own: they do not depend on how the others go on."""
    batch, options = len(input_ids), candidates.options
    generators: list[torch.Generator | None] = [None] * batch
    sampled = candidates.rule != "greedy"
    if sampled and (options.seed is not None or batch > 1):
        seed = int(torch.randint(2**62, ())) if options.seed is None else options.seed
        generators = [torch.Generator().manual_seed((seed + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(batch)]
    rows = []
    for i, generator in enumerate(generators):
        expected = (config.max_length or 0) - input_ids.shape[1]
        pace = None if cost is None else Pace(cost, expected_tokens=max(1, expected))
        processors = processors_of(logits_processor, i, batch)
        proposals = Proposals(candidates.another(generator, processors), pace, trees)
        noise = Noise(generator) if candidates.rule in ("shared_noise", "one_hot") else None
        rows.append(Row(i, input_ids[i : i + 1], processors, proposals, noise, generator, Collected(config)))
    return rows


def _observe_prompt(rows: list[Row], outputs: Any, mask: torch.Tensor | None, last_tap: int) -> None:
    seen = outputs.hidden_states[last_tap].shape[1]
    for i, row in enumerate(rows):
        # left padding conditions nothing; a mask that covers an earlier turn is longer than what was seen
        real = row.input_ids.shape[1] if mask is None else int(mask[i].sum())
        first, count = max(seen - real, 0), min(real, seen)
        kept = min(count, row.proposals.candidates.context.window)  # tapping copies: not the whole prompt
        last = first + count
        row.proposals.candidates.observe(_states(outputs, i, slice(last - kept, last)), 0, kept)
        ids = row.input_ids[0].tolist()
        row.proposals.see(ids if mask is None else ids[-real:])


def _states(outputs: Any, row: int, places: Any) -> list[Any]:
    return [h if h is None else h[row : row + 1, places] for h in outputs.hidden_states]


def _observe(row: Row, outputs: Any, i: int) -> None:
    """The states of the places that were kept; the newest token's own is not known yet."""
    candidates = row.proposals.candidates
    places: Any = row.places
    if places == list(range(len(places))):
        places = slice(0, len(places))  # a view, where it can be one
    candidates.observe(_states(outputs, i, places), 0, len(row.places))


def _commit(
    row: Row,
    i: int,
    outputs: Any,
    logits: torch.Tensor,  # [1 + N, V]
    steps: TargetSteps,
    stopping_criteria: StoppingCriteriaList,
    prefill: bool,
    prompt: int,
    recorder: Recorder,
) -> int:
    """Append what the forward says to one row, token by token, up to where it stops. Returns how many tokens."""
    if steps.ragged and prefill:
        logits = logits[-1:]
    tree, accepted = row.draft.tree, 0
    depth = max(tree.depths, default=0)
    u = row.noise_at(prompt, depth + 1)
    row.places, before = [], row.input_ids.shape[1]
    rule = row.proposals.candidates.rule

    def seen(place: int) -> list[int]:
        return steps.seen(i, tree, place)

    for emitted in emit(rule, row.draft, logits, row.processors, row.input_ids, u, row.generator):
        row.collected.add(outputs, i, emitted, None if prefill else seen)
        row.places.append(emitted.place)
        row.input_ids = torch.cat([row.input_ids, emitted.token.to(row.input_ids.device)[None]], dim=1)
        accepted += emitted.node >= 0
        # the criteria see every prefix once, in order, as in plain decoding
        if bool(stopping_criteria(row.input_ids, row.collected.seen_scores).all()):
            row.finished = True
            break
    committed = row.input_ids.shape[1] - before
    recorder.add(committed=committed, target_steps=1, nodes=len(tree))
    if depth:
        recorder.add_block(depth, accepted)
    if not row.finished:
        row.proposals.see(row.input_ids[0, before:].tolist())
        if not prefill:
            row.proposals.accept(row.draft, accepted, steps.batch, steps.fed - 1)
    return committed


def _draft(rows: list[Row], prompt: int) -> int:
    """The next draft of each row, after one drafter pass over those that want one. Returns how many did."""
    for row in rows:
        row.proposals.look_up(row.input_ids)
    chosen = [rows[i] for i in wanting([row.proposals for row in rows])]
    outputs: dict[int, Any] = {}
    if chosen:
        size = chosen[0].proposals.candidates.drafter.config.block_size
        noise = [row.noise_at(prompt, size) for row in chosen]
        known = [u for u in noise if u is not None]
        anchors = torch.cat([row.input_ids[0, -1:] for row in chosen])
        output = drafter_pass([row.proposals.candidates for row in chosen], anchors, known or None)
        for row in rows:
            row.proposals.drafted = True
        for i, row in enumerate(chosen):
            one = slice(i, i + 1)
            outputs[row.index] = type(output)(
                logits=output.logits[one], z_1=None if output.z_1 is None else output.z_1[one]
            )
    with rows[0].proposals.candidates.products.applied():  # a transition is walked here
        plan([row.proposals for row in rows], [row.input_ids for row in rows], [outputs.get(row.index) for row in rows])
        drafts = [row.proposals.propose(row.input_ids, outputs.get(row.index)) for row in rows]
    for row, draft in zip(rows, cut([row.proposals for row in rows], drafts), strict=True):
        row.draft = draft
    return len(chosen)


def _padded(rows: list[Row], config: GenerationConfig) -> torch.Tensor:  # -> [B, T + n]
    longest = max(row.input_ids.shape[1] for row in rows)
    if len(rows) == 1:
        return rows[0].input_ids
    pad = config._pad_token_tensor
    value = 0 if pad is None else int(pad)
    whole = [torch.nn.functional.pad(r.input_ids, (0, longest - r.input_ids.shape[1]), value=value) for r in rows]
    return torch.cat(whole)

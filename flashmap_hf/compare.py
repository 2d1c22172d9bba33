"""Plain decoding and FlashMap side by side: the same prompts, one process, one after the other in turn."""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from flashmap_hf.compatibility import check_target
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.prompts import check_length, encode
from flashmap_hf.provenance import provenance
from flashmap_hf.runs import Run, Settings, run
from flashmap_hf.statistics import Statistics, record

Show = Callable[[str, str], BaseStreamer]  # a prompt's name, "plain" or "FlashMap" -> who sees the text


@dataclass(frozen=True)
class Spread:
    """Of one number over the rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part. position counts new tokens from 0; a token is None where its output has ended.

    margin: between the target's two best logits there (float32, after its processors): near 0, rounding decides.
    """

    position: int
    plain_token: int | None
    flashmap_token: int | None
    margin: float


@dataclass(frozen=True)
class PromptComparison:
    """One prompt. Rates and times are medians over the rounds; None: there was no such step, or it was not measured."""

    name: str
    prompt: str
    text: str  # FlashMap's, of the last round
    prompt_tokens: int
    plain_new_tokens: int
    flashmap_new_tokens: int
    plain_tokens_per_second: Spread  # of the whole call, prefill included
    flashmap_tokens_per_second: Spread
    speedup: Spread  # of the rounds' own ratios
    tokens_per_step: float  # of FlashMap: tokens / target forwards over all rounds; plain decoding has 1
    prompt_lookup_tokens_per_step: float | None
    acceptance_by_position: list[float]
    plain_step_ms: float | None
    verify_step_ms: float | None
    drafter_ms: float | None
    drafter_share: float | None  # of a plain target step
    identical: bool | None  # None: sampled
    difference: Difference | None


@dataclass(frozen=True)
class Comparison:
    """All prompts, and where the numbers come from."""

    target: str
    drafter: str
    target_dtype: str
    drafter_dtype: str
    device: str
    settings: Settings
    rounds: int
    prompt_lookup_tokens: int
    prompts: list[PromptComparison]
    speedup: float  # mean of the prompts' medians
    provenance: dict[str, Any]

    def verdict(self) -> str:
        """One sentence on who is faster."""
        how = f"{self.speedup:.2f}x plain decoding's speed, the mean over {len(self.prompts)} prompt(s)"
        if self.speedup < 1.0:
            return f"The drafter is SLOWER here: {how}. Decode without it."
        return f"The drafter is faster: {how}."

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


@dataclass
class Measured:
    """The runs of one prompt, in the order of the rounds."""

    prompt_tokens: int
    plain: list[Run] = field(default_factory=list)
    flashmap: list[Run] = field(default_factory=list)
    drafter_ms: list[float | None] = field(default_factory=list)  # per pass, one mean per round
    total: Statistics = field(default_factory=Statistics)
    lookup: Run | None = None
    difference: Difference | None = None
    identical: bool | None = None

    def summary(self) -> dict[str, Any]:
        """The fields of a `PromptComparison` that are numbers."""
        plain = [run.tokens_per_second for run in self.plain]
        flashmap = [run.tokens_per_second for run in self.flashmap]
        plain_step = median_or_none([run.step_ms for run in self.plain])
        drafter_pass = median_or_none(self.drafter_ms)
        return {
            "prompt_tokens": self.prompt_tokens,
            "plain_new_tokens": len(self.plain[-1].tokens),
            "flashmap_new_tokens": len(self.flashmap[-1].tokens),
            "plain_tokens_per_second": Spread.of(plain),
            "flashmap_tokens_per_second": Spread.of(flashmap),
            "speedup": Spread.of([f / p for p, f in zip(plain, flashmap, strict=True)]),
            "tokens_per_step": sum(len(run.tokens) for run in self.flashmap)
            / sum(len(run.forwards) for run in self.flashmap),
            "prompt_lookup_tokens_per_step": self.lookup.tokens_per_step if self.lookup else None,
            "acceptance_by_position": self.total.acceptance_by_position,
            "plain_step_ms": plain_step,
            "verify_step_ms": median_or_none([run.step_ms for run in self.flashmap]),
            "drafter_ms": drafter_pass,
            "drafter_share": drafter_pass / plain_step if drafter_pass and plain_step else None,
            "identical": self.identical,
            "difference": self.difference,
        }


def first_difference(
    target: PreTrainedModel,
    input_ids: torch.Tensor,  # [1, T]
    plain: Sequence[int],
    flashmap: Sequence[int],
    settings: Settings,
) -> Difference | None:
    """Where two greedy continuations of `input_ids` part; one target forward over what they share gives the margin."""
    shared = min(len(plain), len(flashmap))
    if list(plain) == list(flashmap):
        return None
    place = next((i for i in range(shared) if plain[i] != flashmap[i]), shared)
    prefix = torch.cat([input_ids, input_ids.new_tensor(plain[:place])[None]], dim=1)
    step = dataclasses.replace(settings, max_new_tokens=1)
    config = step.generation_config(return_dict_in_generate=True, output_scores=True)
    generate: Any = target.generate
    output = generate(prefix, attention_mask=torch.ones_like(prefix), generation_config=config)
    best, second = output.scores[0][0].float().topk(2).values.tolist()
    tokens = [tokens[place] if place < len(tokens) else None for tokens in (plain, flashmap)]
    return Difference(place, tokens[0], tokens[1], best - second)


def compare(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: FlashMapDrafter,
    prompts: Mapping[str, str],  # name -> text
    settings: Settings,
    *,
    rounds: int = 5,
    prompt_lookup_tokens: int = 10,
    show: Show | None = None,
) -> Comparison:
    """Measure each prompt: a warm-up, then `rounds` times plain, FlashMap, plain, FlashMap ...

    Args:
        prompt_lookup_tokens: for one more run of each prompt with the stock prompt lookup; 0: not measured.
        show: gives the streamer of a warm-up run from the prompt's name and the side; timed runs stream to nobody.

    Raises:
        ValueError: an argument is out of range, the drafter is for another target, a prompt is empty or too long;
            before anything is generated.
    """
    if rounds < 1 or prompt_lookup_tokens < 0 or not prompts:
        raise ValueError(
            f"needs rounds of at least 1, prompt_lookup_tokens of at least 0 and a prompt; there are rounds={rounds}, "
            f"prompt_lookup_tokens={prompt_lookup_tokens} and {len(prompts)} prompts"
        )
    check_target(drafter.config, target, tokenizer)
    inputs = {name: encode(target, tokenizer, text) for name, text in prompts.items()}
    for ids in inputs.values():
        check_length(target, ids["input_ids"].shape[1], settings.max_new_tokens)
    results = []
    for name, ids in inputs.items():
        seconds = 0.0
        for side, assistant in (("plain", None), ("FlashMap", drafter)):
            streamer = show(name, side) if show else None
            seconds += run(
                target, ids, settings.generation_config(), settings.seed, assistant_model=assistant, streamer=streamer
            ).seconds
        if show:
            remark = f"{name}: timing {rounds} round(s) of both, {rounds * seconds:.0f} s or less"
            print(remark, file=sys.stderr, flush=True)
        measured = measure(target, drafter, ids, settings, rounds, prompt_lookup_tokens)
        text = str(tokenizer.decode(measured.flashmap[-1].tokens, skip_special_tokens=True))
        results.append(PromptComparison(name=name, prompt=prompts[name], text=text, **measured.summary()))
    return Comparison(
        target=public_name(target),
        drafter=public_name(drafter),
        target_dtype=str(target.dtype).removeprefix("torch."),
        drafter_dtype=str(drafter.dtype).removeprefix("torch."),
        device=target.device.type,
        settings=settings,
        rounds=rounds,
        prompt_lookup_tokens=prompt_lookup_tokens,
        prompts=results,
        speedup=statistics.mean(result.speedup.median for result in results),
        provenance=provenance(),
    )


def measure(
    target: PreTrainedModel,
    drafter: FlashMapDrafter,
    inputs: Mapping[str, torch.Tensor],  # [1, T] each
    settings: Settings,
    rounds: int,
    prompt_lookup_tokens: int,
) -> Measured:
    """The timed runs of one prompt, interleaved; then what needs no timing: prompt lookup, the first difference."""
    config = settings.generation_config()
    measured = Measured(prompt_tokens=inputs["input_ids"].shape[1])
    with record() as measured.total:
        for seed in range(settings.seed, settings.seed + rounds):
            measured.plain.append(run(target, inputs, config, seed))
            with record() as stats:
                measured.flashmap.append(run(target, inputs, config, seed, assistant_model=drafter))
            measured.drafter_ms.append(1e3 * stats.seconds_drafter / stats.blocks if stats.blocks else None)
    if prompt_lookup_tokens:
        config = settings.generation_config(prompt_lookup_num_tokens=prompt_lookup_tokens)
        measured.lookup = run(target, inputs, config, settings.seed)
    if settings.temperature == 0.0:
        pairs = [(p.tokens, f.tokens) for p, f in zip(measured.plain, measured.flashmap, strict=True)]
        found = (first_difference(target, inputs["input_ids"], *pair, settings) for pair in pairs)
        measured.difference = next((difference for difference in found if difference), None)
        measured.identical = measured.difference is None
    return measured


def median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def public_name(model: PreTrainedModel) -> str:
    """Hub id, or the last part of a folder's path: the rest is the machine's own."""
    name = model.name_or_path or ""
    return (Path(name).name if Path(name).exists() else name) or type(model).__name__

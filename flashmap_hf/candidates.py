"""FlashMapCandidateGenerator: target outputs -> a drafted block, for our own loop and for the stock one."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    CandidateGenerator,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashmap_hf.compatibility import is_pure
from flashmap_hf.conditioning import ContextWindow, stacked, tap
from flashmap_hf.few_rows import FewRows, faster_counts
from flashmap_hf.generation_config import DraftOptions
from flashmap_hf.head import unembedding_rows
from flashmap_hf.modeling_flashmap import FlashMapDrafter
from flashmap_hf.sampled_tree import Offers
from flashmap_hf.tree import TokenTree, chain
from flashmap_hf.verification import draw, first_argmax, uniform

# They keep the most likely token where it is: the argmax of a draft is the same with and without them.
ARGMAX_INVARIANT = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of one sequence.

    tree: what is verified. offers (rejection only): after the anchor and after each node, the children in the order in
    which they are tried, each with the law that it was drawn from, or None for one that was taken for certain.
    """

    tree: TokenTree
    offers: Offers | None = None

    @classmethod
    def of_chain(
        cls, tokens: torch.Tensor, probs: torch.Tensor | None = None, joint: list[float] | None = None
    ) -> "Draft":
        """tokens: `[k]`, one after the other; probs: `[k, V]`, the law each was drawn from (rejection only).

        joint: probability that the tokens up to each are right, where it is known.
        """
        offers = None if probs is None else [*([(i, law)] for i, law in enumerate(probs)), []]
        return cls(chain(tokens.tolist(), joint or [1.0] * len(tokens)), offers)

    @property
    def tokens(self) -> torch.Tensor:
        """`[N]`, of all nodes."""
        return torch.tensor(self.tree.tokens, dtype=torch.long)

    @property
    def probs(self) -> torch.Tensor | None:
        """`[N, V]`: the law that each node of a chain was drawn from."""
        if self.offers is None:
            return None
        return torch.stack([law for offer in self.offers for _, law in offer if law is not None])


NOTHING = Draft(chain([], []))


class FlashMapCandidateGenerator(CandidateGenerator):
    """Drafts a block of up to K tokens from the target's hidden states, one sequence at a time.

    Args:
        drafter, target: the two models; neither is changed.
        generation_config: of the call, prepared by `generate` (do_sample and max_length are read).
        logits_processor: the call's processors; each draft is processed on its own prefix by those that are pure.
        options: the call's drafting options.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: FlashMapDrafter,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        options: DraftOptions,
    ):
        self.drafter, self.target, self.options = drafter, target, options
        self.max_length = generation_config.max_length
        self.tap_layers: list[int] = list(drafter.config.tap_layers or [])
        self.model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": self.tap_layers}
        self.vocab_size = drafter.config.vocab_size
        self.rule = self._rule(bool(generation_config.do_sample))
        self._process_with(logits_processor)
        self.context = ContextWindow(drafter.config.window)
        self.working = True  # False after non-finite draft logits
        self.complaints: list[str] = []  # of the call: shared by the rows of a batch
        self.rows = self._readout_rows()
        self.products = FewRows(drafter)
        if self.rows is not None:
            faster_counts(self.rows)  # `linear` of the head finds it
        # of every id of the target: looked up for each token drafted
        self.draft_positions = drafter.head.draft_positions(torch.arange(self.vocab_size, device=drafter.device))
        self.greedy_noise: torch.Tensor | None = None
        self.generator: torch.Generator | None = None  # None: torch's global one

    def _process_with(self, processors: LogitsProcessorList) -> None:
        # others must not see a prefix that plain decoding may never reach
        self.pure_processors = LogitsProcessorList([p for p in processors if is_pure(p)])
        # processors that cannot change an argmax are left out where only the argmax is read
        self.argmax_processors = [p for p in self.pure_processors if not isinstance(p, ARGMAX_INVARIANT)]

    def another(
        self, generator: torch.Generator | None, processors: LogitsProcessorList
    ) -> "FlashMapCandidateGenerator":
        """The same drafter for another sequence, which draws from `generator` and is processed by `processors`."""
        other = copy.copy(self)
        other.context, other.generator = ContextWindow(self.drafter.config.window), generator
        other._process_with(processors)
        return other

    def _rule(self, do_sample: bool) -> str:
        if not do_sample:
            return "greedy"
        coupled = self.drafter.config.coupling == "quantile"
        rule = self.options.verification
        if rule == "shared_noise" and not coupled:
            raise ValueError(
                f"verification='shared_noise' needs a drafter with coupling='quantile', this one has "
                f"coupling={self.drafter.config.coupling!r}: use verification='rejection'."
            )
        if rule == "auto":
            return "shared_noise" if coupled else "rejection"
        return rule

    def _readout_rows(self) -> torch.Tensor | None:
        head = self.drafter.head
        if head.low_rank:
            return None
        output_embeddings = self.target.get_output_embeddings()
        rows = unembedding_rows(output_embeddings, head.ids if head.restricted else head.size, self.target_hidden_size)
        return rows.to(device=self.drafter.device, dtype=self.drafter.dtype)

    @property
    def target_hidden_size(self) -> int:
        return self.drafter.config.target_hidden_size

    # target outputs -> context

    def observe(self, hidden_states: Any, start: int, count: int) -> None:
        """Take the tapped states of `count` newly committed positions, from index `start` of the target's forward."""
        states = [h if h is None else h[:, start : start + count] for h in hidden_states]  # None: not tapped
        taps = tap(states, self.tap_layers)
        self.context.append(taps.to(self.drafter.device))

    # context -> draft

    @torch.no_grad()
    def draft(self, input_ids: torch.Tensor, u: torch.Tensor | None = None) -> Draft:  # [1, T], [K]
        """Draft the tokens after `input_ids`; fewer than K near the length limit or where confidence is low.

        Args:
            input_ids: `[1, T]`, all committed tokens; the last is the anchor.
            u: `[K]` in [0, 1), the noise of the next K positions; read under shared noise only.
        """
        size = self.room(input_ids)
        if size < 1:
            return NOTHING
        return self.read(input_ids, self._forward(input_ids[:, -1], u), size)

    def room(self, input_ids: torch.Tensor) -> int:  # [1, T]
        """The longest path that can be drafted now; 0 where the drafter does not work, or has seen nothing yet."""
        if not self.working or self.context.taps is None:
            return 0
        room = self.max_length - input_ids.shape[1] - 1  # the target adds one token of its own
        return max(0, min(self.options.num_assistant_tokens, room))

    def read(self, input_ids: torch.Tensor, output: Any, size: int) -> Draft:  # [1, T], FlashMapOutput
        """The chain of at most `size` tokens that the drafter's output says."""
        head = self.drafter.head
        logits = output.logits[0, :size].float()  # [k, N]
        processed = self.rule == "rejection" or len(self.argmax_processors) > 0
        if not processed:
            logits = self.followed(input_ids[0, -1], logits, output.z_1)
        if not self.finite(logits):
            return NOTHING
        if processed:
            return self._processed(input_ids, logits, output.z_1)
        best = first_argmax(logits)
        if self.options.assistant_confidence_threshold > 0.0:  # else nobody reads the confidences
            best = best[: self._confident(logits.softmax(-1).amax(-1).cpu())]
        return Draft.of_chain(head.target_ids(best))

    def _forward(self, anchor: torch.Tensor, u: torch.Tensor | None) -> Any:  # [1], [K] -> FlashMapOutput
        return drafter_pass([self], anchor, None if u is None else [u])

    def noise_of(self, u: torch.Tensor | None) -> torch.Tensor | None:  # [K] -> [K] float32
        """What the drafter may see of the noise: all of it under shared noise, zeros when greedy, else nothing."""
        if self.rule == "greedy":
            return torch.zeros(self.drafter.config.block_size)
        if self.rule != "shared_noise" or u is None:
            return None  # the laws p and q of the other rules do not know the noise
        return u.float()

    def finite(self, logits: torch.Tensor) -> bool:
        """Whether the drafter works; if not, warn and leave it out for the rest of the call."""
        # NaN comes through both; `isfinite` over every logit is slow on a CPU
        finite = bool(logits.amax().isfinite()) and bool(logits.amin().isfinite())
        self.working = self.working and finite  # another draft of the same step may take a finite path
        if not finite and not self.complaints:
            self.complaints.append(
                "The drafter's logits are not finite: this call goes on without it (check its dtype and weights)."
            )
            warnings.warn(self.complaints[0], stacklevel=3)
        return finite

    def gaussian(self, slots: int) -> torch.Tensor:
        """z_0 of the independent coupling; greedy decoding is deterministic and leaves the global generator alone."""
        shape = (1, slots, self.target_hidden_size)
        if self.rule != "greedy":
            return torch.randn(shape, generator=self.generator).to(self.drafter.device)
        if self.greedy_noise is None:
            self.greedy_noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.drafter.device)
        return self.greedy_noise

    def followed(self, anchor: torch.Tensor, logits: torch.Tensor, z_1: torch.Tensor | None) -> torch.Tensor:
        """Logits along the argmax path, if there is a transition. anchor: `[]`; logits: `[k, N]`; z_1: `[1, K, D]`."""
        head = self.drafter.head
        if head.transition is None:
            return logits
        assert z_1 is not None
        previous = self.draft_positions[anchor.to(logits.device)]
        rows: list[torch.Tensor] = []
        for row, z in zip(logits, z_1[0], strict=False):
            rows.append(head.biased(row, z, previous))
            previous = first_argmax(rows[-1])
        return torch.stack(rows)

    def _processed(self, input_ids: torch.Tensor, logits: torch.Tensor, z_1: torch.Tensor | None) -> Draft:
        """Bias and process each position on its own drafted prefix, then draw from it (rejection) or take its argmax.

        input_ids: `[1, T]`; logits: `[k, N]`; z_1: `[1, K, D]`, read by a transition only.
        """
        sampled = self.rule == "rejection"
        processors: Any = self.pure_processors if sampled else LogitsProcessorList(self.argmax_processors)
        head = self.drafter.head
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        confidences: list[float] = []
        prefix = input_ids
        for k, row in enumerate(logits):
            if head.transition is not None:
                assert z_1 is not None
                row = head.biased(row, z_1[0, k], self.draft_positions[prefix[0, -1].to(row.device)])
                if not self.finite(row):
                    break  # the tokens so far stand: dropping them for what they led to would change the law
            scores = self._scores(prefix, row[None], processors)
            if not bool(scores.amax().isfinite()):
                break  # nothing that the drafter knows is allowed here
            law = scores.softmax(-1)
            # confidence is the law's mode, not the drawn token's share: a block that stops depending on the token
            # drawn last would condition that token on having been kept
            confidences.append(float(law.max()))
            if self._confident(torch.tensor(confidences)) < len(confidences):
                break
            token = self.drawn(law) if sampled else law.argmax(-1)
            tokens.append(token)
            probs.append(law)
            prefix = torch.cat([prefix, token[None]], dim=1)
        if not tokens:
            return NOTHING
        joint = torch.tensor(confidences[: len(tokens)]).cumprod(0).tolist()
        return Draft.of_chain(torch.cat(tokens), torch.cat(probs) if sampled else None, joint)

    def laws(self, prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:  # [M, T], [M, N] -> [M, V]
        """What drafts are drawn from under rejection, each on its own prefix; NaN where nothing is allowed."""
        processors: Any = self.pure_processors
        if not processors:
            return self._scores(prefixes, logits, processors).softmax(-1)
        rows = [self._scores(prefix[None], row[None], processors) for prefix, row in zip(prefixes, logits, strict=True)]
        return torch.cat(rows).softmax(-1)

    def _scores(self, prefixes: torch.Tensor, logits: torch.Tensor, processors: Any) -> torch.Tensor:
        """Draft logits over the whole vocabulary, processed. [M, T], [M, N] -> [M, V]"""
        ids, logits = self.drafter.head.ids, self.sharpened(logits)
        scores = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        scores[:, ids] = logits
        processed: torch.Tensor = processors(prefixes, scores.to(prefixes.device))
        return processed

    def sharpened(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of what drafts are drawn from, before any processor."""
        heat = self.options.draft_temperature
        return logits / heat if self.rule == "rejection" and heat != 1.0 else logits

    def drawn(self, laws: torch.Tensor) -> torch.Tensor:  # [M, V] -> [M]
        """One token from each law."""
        return draw(laws, uniform((len(laws),), laws, self.generator))

    def _confident(self, confidence: torch.Tensor) -> int:  # [k] -> how many positions stay above the threshold
        threshold = self.options.assistant_confidence_threshold
        if threshold == 0.0:
            return len(confidence)
        return int((confidence.cumprod(0) >= threshold).int().cumprod(0).sum())

    # the stock loop's door

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,  # ModelOutput
        is_first_iteration: bool = False,
        n_last_matches: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Contract of transformers' assisted decoding, which verifies by rejection or, greedily, by equality.

        Returns:
            `[1, T + k]` ids and `[1, k, V]` logits of q (None when greedy).
        """
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        first = self.context.taps is None
        count = input_ids.shape[1] - 1 if first else int(n_last_matches) + 1
        self.observe(model_outputs.hidden_states, 0, count)
        draft = self.draft(input_ids)
        tokens = draft.tokens.to(input_ids.device)
        candidates = torch.cat([input_ids, tokens[None]], dim=1)
        if self.rule == "greedy" or len(tokens) == 0:
            return candidates, None
        if draft.probs is not None:
            return candidates, draft.probs.log()[None]
        one_hot = torch.full((1, len(tokens), self.vocab_size), -torch.inf, device=input_ids.device)
        return candidates, one_hot.scatter_(2, tokens[None, :, None], 0.0)

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """The block size of a call is constant."""


@torch.no_grad()
def drafter_pass(
    rows: Sequence[FlashMapCandidateGenerator], anchors: torch.Tensor, noise: Sequence[torch.Tensor] | None
) -> Any:
    """One pass of the drafter over several sequences of a call.

    Args:
        rows: their generators, each of which has observed something.
        anchors: `[B]`, the newest committed token of each.
        noise: B times `[K]`, the noise of the next K positions; read under shared noise only.

    Returns:
        `FlashMapOutput` with `logits` `[B, K, N]`.
    """
    first = rows[0]
    drafter, config, device = first.drafter, first.drafter.config, first.drafter.device
    gaussian = None
    if config.coupling == "independent":
        gaussian = torch.cat([row.gaussian(config.block_size) for row in rows])
    seen = [row.noise_of(None if noise is None else noise[i]) for i, row in enumerate(rows)]
    u = torch.stack([v for v in seen if v is not None]).to(device) if seen[0] is not None else None
    embeddings: Any = first.target.get_input_embeddings()
    if (place := embeddings.weight.device).type != "meta":  # offloaded modules fetch their input themselves
        anchors = anchors.to(place)
    taps, mask = stacked([row.context for row in rows])
    with first.products.applied():
        return drafter(
            taps, embeddings(anchors).to(device), rows=first.rows, u=u, noise=gaussian, mask=mask,
            num_steps=first.options.num_steps,
        )  # fmt: skip

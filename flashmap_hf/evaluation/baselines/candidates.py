"""A candidate generator for drafters that name one position after the other, verified by transformers' own loop."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from flashmap_hf.conditioning import tap
from flashmap_hf.evaluation.baselines.modeling import BaselineDrafter
from flashmap_hf.verification import first_argmax


class StepCandidates(CandidateGenerator, ABC):
    """Drafts K tokens, fewer near the length limit; subclasses observe committed positions and give logits.

    As transformers' DFlash generator does, it draws each token from the call's processed law on its own prefix, and
    hands that law to the verification.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: BaselineDrafter,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ):
        self.drafter = drafter
        self.rows = drafter.rows(target)
        self.embeddings: Any = target.get_input_embeddings()
        self.do_sample = bool(generation_config.do_sample)
        self.max_length: Any = generation_config.max_length
        self.logits_processor = logits_processor
        self.tap_layers = self.observed_layers()
        self.model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": self.tap_layers}
        self.prefilled = False

    def observed_layers(self) -> list[int]:
        return list(self.drafter.config.tap_layers or [])

    @abstractmethod
    def observe(self, taps: torch.Tensor, following: torch.Tensor) -> None:
        """Take newly committed positions. taps: `[1, n, N * D]`; following: `[1, n]`, the token after each."""

    @abstractmethod
    def step(self, k: int, token: torch.Tensor) -> torch.Tensor:
        """Draft logits `[N]` of position k, 0 to K - 1, in turn; token `[1]`: the one before it (k = 0: the anchor)."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:  # [1, n] -> [1, n, D]
        if (place := self.embeddings.weight.device).type != "meta":  # offloaded modules fetch their input themselves
            tokens = tokens.to(place)
        return self.embeddings(tokens).to(self.drafter.device)

    @torch.no_grad()
    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """`[1, T + k]` ids and, when sampling, `[1, k, V]` logits of the laws they were drawn from."""
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        seen = int(n_last_matches) + 1 if self.prefilled else input_ids.shape[1] - 1
        count = seen
        if not self.prefilled and model_kwargs is not None and model_kwargs.get("attention_mask") is not None:
            count = int(model_kwargs["attention_mask"][0].sum()) - 1  # left padding conditions nothing
        if not self.prefilled:
            count = min(count, self.drafter.config.window)
        states = [h if h is None else h[:, seen - count : seen] for h in model_outputs.hidden_states]
        self.observe(tap(states, self.tap_layers).to(self.drafter.device), input_ids[:, -count:])
        self.prefilled = True
        prefix: torch.Tensor = input_ids
        laws = []
        for k in range(min(self.drafter.config.block_size, self.max_length - input_ids.shape[1] - 1)):
            token, law = self.choose(self.step(k, prefix[0, -1:]).float(), prefix)
            prefix = torch.cat([prefix, token.view(1, 1).to(prefix.device)], dim=1)
            laws.append(law)
        return prefix, torch.stack(laws, dim=1) if self.do_sample and laws else None

    def choose(self, logits: torch.Tensor, prefix: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A token `[1]` after `prefix` `[1, T]`, and the scores `[1, V]` it was drawn from (None when greedy)."""
        head = self.drafter.head
        if not self.do_sample and not self.logits_processor:
            return head.target_ids(first_argmax(logits)).view(1), None
        scores = logits.new_full((1, self.drafter.config.vocab_size), -torch.inf)
        scores[0, head.ids] = logits
        scores = self.logits_processor(prefix, scores.to(prefix.device))  # type: ignore[arg-type]  # a LongTensor
        if not self.do_sample:
            return scores.argmax(-1), None
        return torch.multinomial(scores.softmax(-1), 1)[0], scores

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """The block size of a call is constant."""

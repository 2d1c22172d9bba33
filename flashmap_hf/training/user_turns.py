"""A target writes its own user turns: it continues the text that its chat template opens one with."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf.training.answers import Answer
from flashmap_hf.training.batch import Request, check_request
from flashmap_hf.training.decode import decode, end_ids

USER, ASSISTANT = "USERxTURNxGOESxHERE", "ASSISTANTxTURNxGOESxHERE"  # plain letters: a template leaves them alone
WAY_OUT = "give it prompts instead: --prompts FILE or --dataset NAME"


@dataclass(frozen=True)
class UserTurn:
    """How the chat template writes a user turn.

    opening: the text up to its first character; stop_ids: the tokens that end it; ending: the text that ends it where
    the template has no token for that, else "".
    """

    opening: str
    stop_ids: tuple[int, ...]
    ending: str

    @classmethod
    def of(cls, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "UserTurn":
        """Read it off the template.

        Raises:
            ValueError: the tokenizer has no chat template, or one that does not show the user's text.
        """
        name = tokenizer.name_or_path
        if tokenizer.chat_template is None:
            raise ValueError(f"{name} has no chat template, so it cannot write user turns: {WAY_OUT}.")
        turns = [{"role": "user", "content": USER}, {"role": "assistant", "content": ASSISTANT}]
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except TemplateError as error:
            raise ValueError(f"the chat template of {name} cannot be rendered ({error}): {WAY_OUT}.") from error
        opening, found, rest = text.partition(USER)
        between, answered, _ = rest.partition(ASSISTANT)
        if not found or not answered:
            raise ValueError(f"the chat template of {name} does not write the turns one after the other: {WAY_OUT}.")
        between = between.strip()
        special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        closing = max((token for token in special if between.startswith(token)), key=len, default=None)
        if closing is not None:
            return cls(opening, tuple(dict.fromkeys([*end_ids(target), special[closing]])), "")
        return cls(opening, tuple(end_ids(target)), between.split("\n")[0])


@dataclass(frozen=True)
class Written:
    """One attempt. The text is None where the turn did not end within the tokens that it had."""

    index: int
    text: str | None
    tokens: int


def write_turns(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    start: int = 0,
    seed: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    batch_size: int = 64,
) -> Iterator[Written]:
    """Attempts `start`, `start + 1`, ... without end and in this order; each is a function of the seed and its index.

    Raises:
        ValueError: as `UserTurn.of`, or max_new_tokens exceed the target's positions.
    """
    turn = UserTurn.of(target, tokenizer)
    opening = list(tokenizer(turn.opening, add_special_tokens=False)["input_ids"])
    if not opening and tokenizer.bos_token_id is not None:  # a template without a header: any text starts like this
        opening = [tokenizer.bos_token_id]
    if not opening:
        raise ValueError(f"the chat template of {tokenizer.name_or_path} opens a user turn with nothing: {WAY_OUT}.")
    requests = (Request(str(i), opening, temperature, max_new_tokens) for i in count(start))
    check_request(target, Request(str(start), opening, temperature, max_new_tokens))
    stop_ids = {*turn.stop_ids, *tokenizer.all_special_ids}  # any other special token spoils the attempt
    answers = decode(target, requests, batch_size=batch_size, seed=seed, stop_ids=stop_ids)
    return _in_order(tokenizer, turn, answers, start)


def _in_order(
    tokenizer: PreTrainedTokenizerBase, turn: UserTurn, answers: Iterator[Answer], start: int
) -> Iterator[Written]:
    finished: dict[int, list[int]] = {}
    for answer in answers:
        finished[int(answer.id)] = answer.response_ids
        while start in finished:  # short turns finish first: taken as they come, a stop would prefer them
            ids = finished.pop(start)
            yield Written(start, _text(tokenizer, turn, ids), len(ids))
            start += 1


def _text(tokenizer: PreTrainedTokenizerBase, turn: UserTurn, ids: list[int]) -> str | None:
    ended = ids[-1] in turn.stop_ids
    text = str(tokenizer.decode(ids[:-1] if ended else ids, clean_up_tokenization_spaces=False))
    if turn.ending and turn.ending in text:
        text, ended = text.split(turn.ending)[0], True
    return text.strip() if ended else None

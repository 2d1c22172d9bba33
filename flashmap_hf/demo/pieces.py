"""Token ids -> the text that each of them adds, as they come."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder makes of the first bytes of a character


class Pieces:
    """Decodes one text token by token; joined, the pieces are the decoded text, special tokens left out.

    A character whose bytes are spread over several tokens comes with the last of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        # Decoding starts a little before the new token: some tokenizers drop the space of a text's first word.
        self.start = self.shown = 0

    def add(self, tokens: Iterable[int]) -> list[str]:
        """One piece per token, empty where the token finishes no character."""
        return [self._add(token) for token in tokens]

    def rest(self) -> str:
        """What an unfinished character at the very end looks like."""
        return self._decode(self.start)[len(self._decode(self.start, self.shown)) :]

    def _add(self, token: int) -> str:
        self.tokens.append(token)
        before, text = self._decode(self.start, self.shown), self._decode(self.start)
        if text.endswith(UNFINISHED) or len(text) <= len(before):
            return ""
        self.start, self.shown = self.shown, len(self.tokens)
        return text[len(before) :]

    def _decode(self, start: int, end: int | None = None) -> str:
        return str(self.tokenizer.decode(self.tokens[start:end], skip_special_tokens=True))

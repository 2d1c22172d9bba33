"""Which texts are worth asking a target: no loops, no copies, of a sensible length."""

import re
from collections import Counter

GRAM = 3  # words in a row
LEAST_GRAMS = 12  # shorter texts repeat themselves by chance
MOST_REPEATED = 0.5  # share of the word triples that a text may have said before
RUN = re.compile(r"(.{1,40}?)\1{11,}", re.DOTALL)  # twelve times the same, however long the rest


class PromptFilter:
    """Counts the texts that it refuses, by reason. Lengths are in characters."""

    def __init__(self, min_length: int, max_length: int):
        self.min_length, self.max_length = min_length, max_length
        self.seen: set[str] = set()
        self.refused: Counter[str] = Counter()

    def accept(self, text: str | None) -> bool:
        """Whether this is a prompt, and a new one; it is remembered. None is one that its writer did not finish."""
        reason = "unfinished" if text is None else self.reason(text)
        if reason:
            self.refused[reason] += 1
        elif text is not None:
            self.remember(text)
        return not reason

    def reason(self, text: str) -> str:
        """Why not; "" for a prompt."""
        if not text.strip():
            return "empty"
        if any(character == "\ufffd" or "\ud800" <= character <= "\udfff" for character in text):
            return "broken characters"
        if len(text) < self.min_length:
            return "too short"
        if len(text) > self.max_length:
            return "too long"
        if is_loop(text):
            return "loop"
        return "duplicate" if normalised(text) in self.seen else ""

    def remember(self, text: str) -> None:
        """Refuse copies of this text from now on."""
        self.seen.add(normalised(text))


def normalised(text: str) -> str:
    """Copies of a text differ in white space and case only."""
    return " ".join(text.split()).casefold()


def is_loop(text: str) -> bool:
    """Whether the text repeats itself, as a model does that has lost its way. Digits and signs may repeat."""
    if any(_has_letter(run[1]) for run in RUN.finditer(text)):
        return True
    words = [word for word in normalised(text).split() if _has_letter(word)]
    grams = list(zip(*(words[i:] for i in range(GRAM)), strict=False))
    return len(grams) >= LEAST_GRAMS and 1 - len(set(grams)) / len(grams) > MOST_REPEATED


def _has_letter(text: str) -> bool:
    return any(character.isalpha() for character in text)

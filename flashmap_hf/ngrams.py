"""What followed earlier occurrences of the last tokens: drafts that cost no forward at all.

Prompt lookup: Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding); several branches as in Yang et al. 2023
(arXiv:2304.04487).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

_LOOKED_AT = 32  # earlier occurrences of each length: a text that repeats itself may have thousands, all alike
_TOKEN_BITS = 32


class NGramIndex:
    """The n-grams of a growing text: each one's newest place, and for each place the one before it.

    Time: constant per token added. Memory: per length one dictionary entry for each distinct n-gram and four bytes
    per token.
    """

    def __init__(self, tokens: Sequence[int] = (), longest: int = 3, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest must be at least 1 and at most longest, got {shortest} and {longest}")
        self.tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._masks = {n: (1 << n * _TOKEN_BITS) - 1 for n in self._lengths}
        self._newest: dict[int, dict[int, int]] = {n: {} for n in self._lengths}  # n-gram -> where it ends
        self._before = {n: array("i") for n in self._lengths}  # end - 1 -> end of the same n-gram before, or 0
        self._suffix = 0  # the last `longest` tokens as one number
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        widest = self._masks[self._lengths[0]]
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            self._suffix = (self._suffix << _TOKEN_BITS | token) & widest
            for n, mask in self._masks.items():
                if end < n:
                    self._before[n].append(0)
                    continue
                newest, gram = self._newest[n], self._suffix & mask
                self._before[n].append(newest.get(gram, 0))
                newest[gram] = end

    def continuations(self, count: int, length: int) -> list[tuple[list[int], int]]:
        """Up to `count` distinct branches of `length` tokens, each with the length of the match that it followed.

        Longest match first, then the most recent one; the 32 most recent ones of each length are looked at. A branch
        that runs into the end of the text goes on with its own beginning: a text that repeats itself is continued
        with its period.
        """
        found: dict[tuple[int, ...], int] = {}
        if length < 1:
            return []
        for start, n in self._matches():
            if len(found) >= count:
                break
            branch = self.tokens[start : start + length]
            period = len(self.tokens) - start
            while len(branch) < length:
                branch.append(branch[len(branch) - period])
            found.setdefault(tuple(branch), n)
        return [(list(branch), n) for branch, n in found.items()]

    def _matches(self) -> Iterator[tuple[int, int]]:
        """Where earlier occurrences of the last n tokens end, and n."""
        for n in self._lengths:
            end = len(self.tokens)
            for _ in range(_LOOKED_AT):
                end = self._before[n][end - 1] if end else 0
                if not end:
                    break
                yield end, n

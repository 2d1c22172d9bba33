"""Drafts from the text itself: the index equals a brute scan, grows in pieces, and continues what repeats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmap_hf.ngrams import NGramIndex

LOOKED_AT = 32


def reference(tokens: list[int], count: int, length: int, longest: int, shortest: int) -> list[tuple[list[int], int]]:
    """A scan of the whole text for each length."""
    found: list[tuple[list[int], int]] = []
    if length < 1:
        return []
    for n in range(longest, shortest - 1, -1):
        suffix = tokens[len(tokens) - n :]
        ends = [end for end in range(len(tokens) - 1, n - 1, -1) if tokens[end - n : end] == suffix]
        for end in ends[:LOOKED_AT] if n <= len(tokens) else []:
            endless = tokens[end:] * (length + 1)  # what follows, again and again
            if endless[:length] not in [branch for branch, _ in found]:
                found.append((endless[:length], n))
    return found[:count]


TEXTS = st.lists(st.integers(0, 2), max_size=60)


@given(TEXTS, st.integers(0, 6), st.integers(0, 8), st.integers(1, 4), st.data())
def test_the_index_equals_a_scan(text, count, length, longest, data):
    shortest = data.draw(st.integers(1, longest))
    index = NGramIndex(text, longest, shortest)
    assert index.continuations(count, length) == reference(text, count, length, longest, shortest)


@given(st.lists(st.lists(st.integers(0, 2**31), max_size=5) | st.lists(st.integers(0, 1), max_size=5), max_size=12))
def test_a_text_may_come_in_pieces(pieces):
    index, text = NGramIndex(), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert index.tokens == text
        assert index.continuations(4, 5) == reference(text, 4, 5, 3, 2)


def test_longest_match_first_then_the_most_recent():
    text = [1, 2, 3, 10, 8, 2, 3, 20, 9, 1, 2, 3, 30, 7, 2, 3, 40, 1, 2, 3]
    found = NGramIndex(text).continuations(9, 2)
    assert found == [([30, 7], 3), ([10, 8], 3), ([40, 1], 2), ([20, 9], 2)]
    assert NGramIndex(text).continuations(1, 2) == found[:1]
    assert NGramIndex(text, longest=2).continuations(1, 2) == [([40, 1], 2)]
    assert NGramIndex(text, shortest=3).continuations(9, 2) == found[:2]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_text_that_repeats_itself_is_continued_with_its_period(period):
    text = [i % period for i in range(40)]
    expected = [i % period for i in range(40, 52)]
    assert NGramIndex([9, 8, *text]).continuations(4, 12) == [(expected, 3)]


def test_nothing_follows_what_is_new():
    assert NGramIndex().continuations(4, 4) == []
    assert NGramIndex([5]).continuations(4, 4) == []
    assert NGramIndex([1, 2, 3, 4]).continuations(4, 4) == []
    assert NGramIndex([1, 2, 1, 2]).continuations(4, 0) == []
    assert NGramIndex([1, 2, 1, 2]).continuations(0, 4) == []


def test_no_more_than_the_newest_occurrences_are_looked_at():
    """4,000 equal places and a different one far behind: the time of a call does not grow with the text."""
    text = [1, 2, 3, 99] + [1, 2, 3, 4] * 4_000 + [1, 2, 3]
    assert NGramIndex(text).continuations(9, 1) == [([4], 3)]
    near = [1, 2, 3, 99] + [1, 2, 3, 4] * (LOOKED_AT - 1) + [1, 2, 3]
    assert NGramIndex(near).continuations(9, 1) == [([4], 3), ([99], 3)]


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="shortest must be at least 1 and at most longest, got 4 and 3"):
        NGramIndex([], 3, 4)
    with pytest.raises(ValueError, match="shortest must be at least 1"):
        NGramIndex([], 3, 0)

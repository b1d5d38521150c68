"""Drafts without a model: what followed the last time that the text's end stood earlier in the text."""

from typing import NamedTuple

MIN_TOKENS, MAX_TOKENS = 2, 4  # of a suffix that is looked up; one token alone says little


class Match(NamedTuple):
    """The last `tokens` ids of a text of `length` ids also stand right before `position`."""

    tokens: int
    position: int
    length: int

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """`count` tokens after the first `length` of ids; what repeats up to the text's end goes on repeating."""
        period = self.length - self.position
        return [ids[self.position + i % period] for i in range(count)]


class NgramIndex:
    """The most recent place of every run of MIN_TOKENS..MAX_TOKENS ids of one text, which only grows."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # run of ids -> position of the token after it
        self._length = 0  # tokens whose preceding runs are in the index

    def match(self, ids: list[int]) -> Match | None:
        """The longest suffix of ids that has a token after it elsewhere. Costs the tokens added since the last call."""
        for end in range(self._length, len(ids)):
            for tokens in range(MIN_TOKENS, min(MAX_TOKENS, end) + 1):
                self._after[tuple(ids[end - tokens : end])] = end
        self._length = len(ids)
        for tokens in range(min(MAX_TOKENS, len(ids)), MIN_TOKENS - 1, -1):
            if position := self._after.get(tuple(ids[-tokens:])):
                return Match(tokens, position, len(ids))
        return None

"""Lookup of what followed the text's end before: the longest suffix, then the most recent, at a cost per token that does not
grow with the text."""

import pytest

from runtime_py.ngram import MAX_TOKENS, MIN_TOKENS, Match, NgramIndex


@pytest.mark.parametrize(
    ("ids", "match", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2], (2, 2), [3, 9, 1, 2, 3]),  # goes on repeating
        ([1, 2, 7, 1, 2, 8, 1, 2], (2, 5), [8, 1, 2, 8, 1]),  # the most recent
        ([5, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2], (3, 3), [7, 4, 1, 2, 8]),  # the longest, before the most recent
        ([4, 4, 4], (2, 2), [4, 4, 4, 4, 4]),
        ([9, 8, 7, 6, 5, 1, 0, 8, 7, 6, 5], (4, 5), [1, 0, 8, 7, 6]),
        ([1, 2, 3, 4], None, None),
        ([1, 2, 1], None, None),  # one token is too little
        ([], None, None),
    ],
)
def test_longest_suffix_then_most_recent(ids, match, drafts):
    found = NgramIndex().match(ids)
    if match is None:
        assert found is None
    else:
        assert found == Match(*match, len(ids))
        assert found.drafts(ids, 5) == drafts


def test_index_built_token_by_token_matches_as_a_search_does():
    ids, index = [], NgramIndex()
    for i in range(300):
        ids.append((i * i + i // 7) % 5)
        found = index.match(ids)
        for tokens in range(min(MAX_TOKENS, len(ids)), MIN_TOKENS - 1, -1):
            places = [p for p in range(tokens, len(ids)) if ids[p - tokens : p] == ids[-tokens:]]
            if places:
                assert found == Match(tokens, places[-1], len(ids))
                break
        else:
            assert found is None


class CountingList(list):
    """Counts the slices taken of a text."""

    slices = 0

    def __getitem__(self, key):
        CountingList.slices += isinstance(key, slice)
        return super().__getitem__(key)


def test_a_step_costs_the_same_however_long_the_text_is():
    costs = []
    for length in (100, 10_000):
        ids, index = CountingList(range(length)), NgramIndex()
        index.match(ids)
        CountingList.slices = 0
        ids.append(1)
        index.match(ids)
        costs.append(CountingList.slices)
    assert costs[0] == costs[1] < 10

"""The token ids and the numbers of rows that are run, the same for every engine."""

import numpy as np

FIRST = 3  # behind the special tokens
ROWS = (1, 2, 3, 4, 5, 8)  # of a decode and of verifies


def random_ids(vocab_size: int, count: int) -> list[int]:
    return np.random.default_rng(1).integers(FIRST, vocab_size, count).tolist()

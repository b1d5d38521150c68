"""The token ids that are run, the same for every engine."""

import numpy as np

FIRST = 3  # behind the special tokens


def random_ids(vocab_size: int, count: int) -> list[int]:
    return np.random.default_rng(1).integers(FIRST, vocab_size, count).tolist()

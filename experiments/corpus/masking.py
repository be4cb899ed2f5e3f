"""Masked language modelling: hide some tokens of a row and ask for them."""

from __future__ import annotations

import numpy as np

# Of a row, the share that is asked for; of those, the shares that are masked and replaced. The rest stays as it is.
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1


def mask(tokens: np.ndarray, vocabulary: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A row that was made hard to read, and which of its tokens are asked for.

    15% of the places, at least one, are chosen without replacement. A chosen token becomes the mask, the id behind the
    vocabulary, 8 times of 10, and any token, perhaps the same, 1 time of 10.
    Args:
        tokens: [T] int64 in [0, vocabulary).
    Returns:
        tokens [T] int64 in [0, vocabulary]; chosen [T] bool.
    Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1 and appendix A.1.
    """
    chosen = np.zeros(len(tokens), dtype=bool)
    chosen[rng.permutation(len(tokens))[: max(1, round(CHOSEN * len(tokens)))]] = True
    # One draw for every place, so that what happens at one does not depend on how many were chosen before it.
    fate, other = rng.random(len(tokens)), rng.integers(vocabulary, size=len(tokens))
    hidden = np.where(fate < MASKED, vocabulary, np.where(fate < MASKED + REPLACED, other, tokens))
    return np.where(chosen, hidden, tokens), chosen

"""Tokens of guided sequences that need no draw, as a grammar allows one alone: each is appended once that is known.

    step      draws b         computes b c d and draws e
    tokens    a b | c d       a b c d e
                    forced

A token is forced if the edits of its draw allow no other: the draw would return it whatever the logits are. So an
output has the same tokens with and without, and what is forced may depend on time or load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from decant.engine.guides.mask import begin_masks
from decant.engine.sequence import Sequence

ROWS_PER_SECOND = 7500
"""Most guided rows of a step for each second that a step costs beside its tokens. The masks of more take longer, at 20
microseconds each, than the steps cost that are saved, where 15 of 100 tokens are forced.
"""
MAX_FORCED = 16
"""Most tokens behind one draw: their masks are computed one after the other, before the next step."""


def append_forced(
    sequences: Iterable[Sequence], eos: frozenset[int], most: int, append: Callable[[Sequence, int], bool]
) -> None:
    """Append up to ``most`` tokens to each of the sequences, which have just drawn a token.

    ``append`` appends one, and returns whether the sequence goes on.
    """
    left = [(each, each.state, each.state.guide) for each in sequences if each.state and each.state.guide]
    for count in range(1, most + 1):
        if not left:
            return
        begin_masks([(guide, each.tokens, len(each.tokens)) for each, _, guide in left])
        further = []
        for each, state, guide in left:
            token = state.only_token(each.tokens, len(each.tokens), eos)
            if token is not None:
                each.num_forced = count
                if append(each, token):
                    further.append((each, state, guide))
        left = further

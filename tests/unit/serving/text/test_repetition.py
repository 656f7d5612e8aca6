"""An answer that runs in circles is noticed, and only such a one."""

from __future__ import annotations

import random

import pytest

from quire.serving.text.repetition import RepetitionWatch
from quire.types.sampling import RepetitionDetection


def repeats_naively(tokens: list[int], rule: RepetitionDetection) -> bool:
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        length = size * rule.min_count
        if len(tokens) >= length and tokens[-length:] == tokens[-size:] * rule.min_count:
            return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_judged_as_a_look_at_the_whole_answer_would(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.randint(1, 3)
    rule = RepetitionDetection(rng.randint(low, 6), low, rng.randint(2, 4))
    watch, tokens = RepetitionWatch(rule), list[int]()
    for _ in range(200):
        tokens.append(rng.randint(0, 1) if rng.random() < 0.8 else rng.randint(0, 5))
        assert watch.push(tokens[-1]) == repeats_naively(tokens, rule)


def test_a_phrase_that_comes_back_after_others_is_no_loop() -> None:
    watch = RepetitionWatch(RepetitionDetection(max_pattern_size=3, min_count=2))
    assert not any(watch.push(token) for token in (1, 2, 3, 9, 1, 2, 3))

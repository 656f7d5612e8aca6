"""Texts that are computed together."""

from __future__ import annotations

import random

import torch

from quire.runtime.encoder.batches import batches_of, pack


def test_every_text_is_in_one_batch_and_no_batch_is_too_large() -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(1, 60) for _ in range(200)]
    batches = list(batches_of(lengths, 128, 16))
    assert sorted(text for batch in batches for text in batch) == list(range(200))
    assert all(len(batch) <= 16 for batch in batches)
    assert all(len(batch) * max(lengths[text] for text in batch) <= 128 for batch in batches)
    assert list(batches_of([], 8, 8)) == []


def test_tokens_stand_one_after_the_other() -> None:
    texts = pack([[7, 8, 9], [5], [1, 2]], torch.device("cpu"))
    assert texts.token_ids.tolist() == [7, 8, 9, 5, 1, 2]
    assert texts.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert texts.places is not None
    assert texts.places.tolist() == [0, 1, 2, 3, 6, 7]
    assert texts.mask is not None
    assert texts.mask.view(3, 3).tolist() == [[True] * 3, [True, False, False], [True, True, False]]


def test_texts_of_one_length_are_a_grid_already() -> None:
    texts = pack([[7, 8], [5, 6]], torch.device("cpu"))
    assert texts.places is None
    assert texts.mask is None
    assert texts.positions.tolist() == [0, 1, 0, 1]

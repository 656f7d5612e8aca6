"""Batches of texts for an encoder."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire.config.model import Heads
from quire.runtime.encoder.batches import batches_of, pack
from quire.runtime.layers import texts as texts_module
from quire.runtime.layers.texts import TextAttention


def test_every_text_is_in_one_batch_and_no_batch_is_too_large() -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(1, 60) for _ in range(200)]
    batches = list(batches_of(lengths, 128, 16))
    assert sorted(text for batch in batches for text in batch) == list(range(200))
    assert all(len(batch) <= 16 for batch in batches)
    assert all(len(batch) * max(lengths[text] for text in batch) <= 128 for batch in batches)
    assert list(batches_of([], 8, 8)) == []


def test_tokens_of_a_batch_are_packed_one_text_after_the_other() -> None:
    texts = pack([[7, 8, 9], [5], [1, 2], [3, 4]], torch.device("cpu"))
    assert texts.token_ids.tolist() == [7, 8, 9, 5, 1, 2, 3, 4]
    assert texts.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert texts.runs == ((1, 3), (1, 1), (2, 2))
    assert texts.places is texts.mask is texts.type_ids is None


def test_texts_of_different_lengths_on_a_gpu_get_indices_in_a_padded_grid() -> None:
    texts = pack([[7, 8, 9], [5], [1, 2]], torch.device("meta"))
    assert texts.places is not None
    assert texts.places.shape == (6,)
    assert texts.mask is not None
    assert texts.mask.shape == (3, 1, 1, 3)


def test_the_second_part_of_a_pair_is_of_type_1() -> None:
    texts = pack([[7, 8, 9], [5, 6]], torch.device("cpu"), [2, 2])
    assert texts.type_ids is not None
    assert texts.type_ids.tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("reach", [0, 3, 300, 600])
def test_a_window_hides_the_tokens_out_of_reach_on_both_sides(reach: int, is_padded: bool) -> None:
    torch.manual_seed(0)
    heads, lengths = Heads(num_query=4, num_kv=2, dim=8), [550, 2]
    texts = pack([[1] * length for length in lengths], torch.device("cpu"))
    is_token = torch.arange(550) < torch.tensor(lengths)[:, None]
    if is_padded:
        texts = replace(texts, places=is_token.flatten().nonzero()[:, 0], mask=is_token.view(2, 1, 1, -1))
    qkv = torch.randn(sum(lengths), 8 * 8)
    found = TextAttention(heads, scale=0.3, reach=reach)(qkv, texts)
    for part, own in zip(qkv.split(lengths), found.split(lengths), strict=True):
        query, key, value = part.view(len(part), 8, 8).transpose(0, 1).split([4, 2, 2])
        scores = 0.3 * query @ key.repeat_interleave(2, dim=0).mT
        places = torch.arange(len(part))
        scores.masked_fill_((places[:, None] - places).abs() > reach, float("-inf"))
        wanted = scores.softmax(dim=-1) @ value.repeat_interleave(2, dim=0)
        torch.testing.assert_close(own, wanted.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("most", [10, 1 << 20])  # elements of a mask
def test_a_bias_is_added_to_the_scores_of_runs_and_of_a_grid(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "MASK_ELEMENTS", most)
    torch.manual_seed(0)
    heads, lengths = Heads(num_query=2, num_kv=2, dim=8), [5, 3, 3, 1]
    runs = replace(pack([[1] * length for length in lengths], torch.device("cpu")), bias=torch.randn(1, 2, 5, 5))
    is_token = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    grid = replace(runs, places=is_token.flatten().nonzero()[:, 0], mask=is_token.view(len(lengths), 1, 1, -1))
    qkv, attention = torch.randn(sum(lengths), 3 * 16), TextAttention(heads)
    found = attention(qkv, runs)
    torch.testing.assert_close(found, attention(qkv, grid))
    assert runs.bias is not None
    query, key, value = qkv[5:8].view(3, 3, 2, 8).permute(1, 2, 0, 3)
    wanted = (query @ key.mT / 8**0.5 + runs.bias[0, :, :3, :3]).softmax(dim=-1) @ value
    torch.testing.assert_close(found[5:8], wanted.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("lengths", [[5, 3, 3, 1], [4, 4]])
def test_attention_over_a_padded_grid_equals_attention_over_runs(lengths: list[int]) -> None:
    torch.manual_seed(0)
    heads = Heads(num_query=2, num_kv=2, dim=8)
    runs = pack([[1] * length for length in lengths], torch.device("cpu"))
    is_token = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    grid = replace(runs, places=is_token.flatten().nonzero()[:, 0], mask=is_token.view(len(lengths), 1, 1, -1))
    qkv = torch.randn(sum(lengths), 3 * 16)
    attention = TextAttention(heads)
    torch.testing.assert_close(attention(qkv, runs), attention(qkv, grid))

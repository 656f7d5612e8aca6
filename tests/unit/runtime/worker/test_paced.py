"""Paced rows on every kind of worker: drafts that are verified, beams that fork, masks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.model import Heads
from quire.runtime.sampling.make import make_sampler
from quire.types.step import Chunk, Masks
from tiny_models import DEVICE, VOCAB, Bench, MemoryCheckpoint, engine_config, random_checkpoint, tiny_config

ROWS, PROMPT = 6, [5, 6, 7]
WAYS: dict[int, dict[str, Any]] = {
    0: {"temperature": 0.0},
    1: {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.8},
    2: {"temperature": 1.0},
}


@pytest.fixture(params=["reference", "triton"])
def attention(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    return str(request.param)


@cache
def checkpoint() -> MemoryCheckpoint:
    sizes = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32, "heads": Heads(2, 1, 16)}
    return random_checkpoint(tiny_config("qwen3", **sizes, tie_word_embeddings=True))


def bench(attention: str) -> Bench:
    """With the sampler that an executor gives it."""
    config = engine_config(rows=ROWS, num_blocks=64, max_len=64)
    kernels = "triton" if attention == "triton" else "torch"
    num_samples = config.scheduler.num_samples
    sampler = make_sampler(ROWS, VOCAB, torch.device(DEVICE), kernels, num_samples)  # type: ignore[arg-type]
    return Bench(checkpoint(), config, attention=attention, sampler=sampler)


@cache
def plain(row: int, count: int = 7) -> list[int]:
    """What a row decodes alone, one token after the other."""
    made = bench("reference")
    made.add(row, PROMPT, seed=row, **WAYS[row])
    made.run(chunks=[Chunk(row, 0, 3, (row,))])
    for _ in range(count - 1):
        made.run(decode=[row])
    return made.tokens[row][3:]


def begun(attention: str, rows: list[int]) -> Bench:
    made = bench(attention)
    for row in rows:
        made.add(row, PROMPT, seed=row, **WAYS[row])
    made.run(chunks=[Chunk(row, 0, 3, (row,)) for row in rows])
    return made


def test_drafts_are_verified_by_the_tokens_of_plain_decoding_beside_decoding_rows(attention: str) -> None:
    made = begun(attention, [0, 1, 2])
    wanted = plain(1)
    wrong = [wanted[1], wanted[2], (wanted[3] + 1) % VOCAB]
    made.write(1, 4, wrong)
    made.run(decode=[2, 0], chunks=[Chunk(1, 3, 4, (1,), num_sampled=4)])
    samples = made.result.token_ids.tolist()
    assert samples[:2] == [plain(2)[1], plain(0)[1]]
    assert samples[2:5] == wanted[1:4]  # two are right, the third is put right, the last is worth nothing
    assert made.worker.rows.lengths[1] == 7  # it holds the draft and has not grown
    assert made.worker.rows.lengths[0] == 5

    made.write(1, 6, [wanted[3]])
    made.run(decode=[0, 2, 1])
    assert made.result.token_ids[2] == wanted[4]
    made.run(decode=[1])
    assert made.tokens[1][3:] == wanted[:6]
    assert made.tokens[0][3:] == plain(0)[:3]


def test_a_row_that_runs_ahead_again_continues_from_the_written_tokens() -> None:
    made = begun("reference", [0])
    wanted = plain(0)
    made.write(0, 4, wanted[1:3])  # the engine was told of these by a draft that was all right
    made.run(chunks=[Chunk(0, 3, 2)])
    made.run(decode=[0])
    made.run(decode=[0])
    assert made.tokens[0][3:] == wanted[:5]


def test_several_drafts_of_one_step_are_verified_each_from_its_own_position() -> None:
    made = begun("reference", [0, 1, 2])
    for row, count in ((0, 1), (1, 3), (2, 2)):
        made.write(row, 4, plain(row)[1 : 1 + count])
    chunks = [Chunk(row, 3, count + 1, (row,), num_sampled=count + 1) for row, count in ((0, 1), (1, 3), (2, 2))]
    made.run(chunks=chunks)
    wanted = plain(0)[1:3] + plain(1)[1:5] + plain(2)[1:4]
    assert made.result.token_ids.tolist() == wanted


def test_more_samples_than_a_round_holds_are_sampled_in_several_rounds() -> None:
    made = begun("reference", [0, 1, 2])
    made.worker._runner._num_samples = 2
    for row in (0, 1, 2):
        made.write(row, 4, plain(row)[1:3])
    made.run(chunks=[Chunk(row, 3, 3, (row,), num_sampled=3) for row in (0, 1, 2)])
    assert made.result.token_ids.tolist() == plain(0)[1:4] + plain(1)[1:4] + plain(2)[1:4]


def test_beams_fork_and_continue_with_the_tokens_they_are_given(attention: str) -> None:
    made = bench(attention)
    made.add(0, PROMPT, num_candidates=4)
    made.run(chunks=[Chunk(0, 0, 3, (0,))])
    first = made.result.candidates
    assert first is not None
    assert first.samples.tolist() == [0]
    best, second = first.token_ids[0, :2].tolist()
    made.write(0, 3, [best])
    made.add(1, [*PROMPT, second], parent=0, num_prompt=3, num_candidates=4)
    made.unshare_tail(1)
    made.run(decode=[0, 1])
    both = made.result.candidates
    assert both is not None
    for row, token in ((0, best), (1, second)):
        alone = bench("reference")
        alone.add(0, [*PROMPT, token], num_candidates=4)
        alone.run(chunks=[Chunk(0, 0, 4, (0,))])
        wanted = alone.result.candidates
        assert wanted is not None
        assert both.token_ids[row].tolist() == wanted.token_ids[0].tolist()
        np.testing.assert_allclose(both.scores[row], wanted.scores[0], atol=1e-4)


def test_masks_apply_to_their_samples_and_an_empty_mask_fails_only_its_row(attention: str) -> None:
    made = begun(attention, [0, 1, 2])
    bits = np.zeros((2, -(-VOCAB // 32)), dtype=np.uint32)
    bits[0, 1] = 1 << 9  # token 41 alone
    made.run(decode=[0, 1, 2], masks=Masks(np.array([0, 2], dtype=np.int32), bits))
    result = made.result
    assert result.token_ids.tolist() == [41, plain(1)[1], 0]
    assert [(failure.row, "grammar" in failure.reason) for failure in result.failures] == [(2, True)]
    made.write(1, 5, plain(1)[2:4])
    bits = np.full((1, -(-VOCAB // 32)), 2**32 - 1, dtype=np.uint32)
    bits[0, 0] = 0
    bits[0, 3] = 0  # none of 0 to 31 nor 96
    made.run(chunks=[Chunk(1, 4, 3, (1,), num_sampled=3)], masks=Masks(np.array([1], dtype=np.int32), bits))
    found = made.result.token_ids.tolist()
    assert [found[0], found[2]] == [plain(1)[2], plain(1)[4]]
    assert 32 <= found[1] < 96


def test_a_written_token_outside_the_vocabulary_fails_only_its_row() -> None:
    made = begun("reference", [0, 1])
    made.write(1, 4, [VOCAB])
    made.run(decode=[0], chunks=[Chunk(1, 3, 2, (1,), num_sampled=2)])
    assert [failure.row for failure in made.output.failures] == [1]
    assert made.result.token_ids[0] == plain(0)[1]


def test_shared_blocks_are_searched_again_when_a_row_becomes_shorter() -> None:
    pytest.importorskip("triton")
    made = begun("triton", [0])
    rows = made.worker.rows
    before = rows.tables_version
    made.write(0, 3, [4, 5])
    made.run(chunks=[Chunk(0, 3, 2, (0,), num_sampled=2)])
    assert rows.tables_version == before
    made.write(0, 3, [9])
    made.run(decode=[0])
    assert rows.tables_version == before + 1

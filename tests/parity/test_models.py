"""Every model family against transformers, in float32, through worker and plans made by hand."""

from __future__ import annotations

import random

import pytest
import torch

from quire.config.model import Heads, ModelConfig, Rope
from quire.types.step import Chunk
from tiny_models import VOCAB, Bench, checkpoint_of, engine_config, greedy_reference, tiny_config, transformers_model

pytest.importorskip("transformers")

LLAMA3 = (
    ("factor", 8.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 32.0),
)
YARN = (("factor", 4.0), ("original_max_position_embeddings", 32.0))
CASES: dict[str, ModelConfig] = {
    "llama": tiny_config(),
    "llama with biases, tied": tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama, one head per group, head_dim unlike hidden": tiny_config(heads=Heads(4, 4, 24)),
    "llama3 rope": tiny_config(rope=Rope(theta=500_000.0, kind="llama3", scaling=LLAMA3, max_position=256)),
    "linear rope": tiny_config(rope=Rope(kind="linear", scaling=(("factor", 4.0),))),
    "yarn rope": tiny_config(rope=Rope(kind="yarn", scaling=YARN, max_position=128)),
    "dynamic rope": tiny_config(rope=Rope(kind="dynamic", scaling=(("factor", 2.0),), max_position=24)),
    "mistral": tiny_config("mistral", rope=Rope(theta=1e6)),
    "qwen2, tied": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen3": tiny_config("qwen3", heads=Heads(4, 2, 32), norm_eps=1e-6),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    model = transformers_model(CASES[name])
    bench = Bench(checkpoint_of(model, CASES[name]), engine_config())
    prompts = {0: prompt(5), 1: prompt(37, 1), 2: prompt(1, 2)}
    for row, tokens in prompts.items():
        bench.add(row, tokens)
        bench.run(chunks=[Chunk(row, 0, len(tokens), (row,))])
    for _ in range(11):
        bench.run(decode=[2, 0, 1])
    for row, tokens in prompts.items():
        expected, logits = greedy_reference(model, tokens, 12)
        torch.testing.assert_close(torch.stack(bench.sampler.seen[row]), logits, rtol=1e-4, atol=1e-4)
        assert bench.tokens[row][len(tokens) :] == expected


@pytest.mark.parametrize("attention", ["gather", "reference"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_block_size_and_chunking_change_nothing(block_size: int, attention: str) -> None:
    config = CASES["llama3 rope"]
    model = transformers_model(config)
    bench = Bench(
        checkpoint_of(model, config), engine_config(block_size=block_size, num_blocks=320), attention=attention
    )
    long, short = prompt(61, 3), prompt(7, 4)
    bench.add(3, short)
    bench.run(chunks=[Chunk(3, 0, 7, (3,))])
    bench.add(5, long)
    start = 0
    for size in (1, 3, 17, 2, 31, 7):  # odd chunks, each beside a decode row
        end = start + size
        bench.run(decode=[3], chunks=[Chunk(5, start, size, (5,) if end == 61 else ())])
        start = end
    for _ in range(5):
        bench.run(decode=[5, 3])
    for row, tokens in ((5, long), (3, short)):
        expected, _ = greedy_reference(model, tokens, len(bench.tokens[row]) - len(tokens))
        assert bench.tokens[row][len(tokens) :] == expected


def test_many_rows_of_very_different_length_decode_together() -> None:
    config = CASES["qwen3"]
    model = transformers_model(config)
    bench = Bench(checkpoint_of(model, config), engine_config(rows=24, num_blocks=800, block_size=4))
    prompts = {row: prompt(1 + (row * 37) % 190, row) for row in range(24)}
    for row, tokens in prompts.items():
        bench.add(row, tokens)
    bench.run(chunks=[Chunk(row, 0, len(tokens), (row,)) for row, tokens in prompts.items()])
    for _ in range(6):
        bench.run(decode=list(prompts))
    for row in (0, 5, 11, 23):
        expected, _ = greedy_reference(model, prompts[row], 7)
        assert bench.tokens[row][len(prompts[row]) :] == expected


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_forks_share_the_prompt_and_part_after_a_block_copy(block_size: int) -> None:
    config = CASES["llama"]
    model = transformers_model(config)
    bench = Bench(checkpoint_of(model, config), engine_config(block_size=block_size))
    tokens = prompt(10, 6)
    bench.add(0, tokens)
    bench.run(chunks=[Chunk(0, 0, 6)])
    bench.reserve(0, 10)
    for child in (1, 2):
        bench.add(child, tokens, parent=0)
    first = bench.run(chunks=[Chunk(0, 6, 4, (0, 1, 2))])
    assert first[0] == first[1] == first[2]
    forced = {1: (first[0] + 1) % VOCAB, 2: (first[0] + 2) % VOCAB}  # make the children go their own ways
    for child, token in forced.items():
        bench.tokens[child][-1] = token
        bench.worker.rows.tokens[child, 10] = token
        if 10 % block_size:
            bench.unshare_tail(child)
    for _ in range(8):
        bench.run(decode=[1, 0, 2])
    for row in (0, 1, 2):
        start = [*tokens, bench.tokens[row][10]]
        expected, _ = greedy_reference(model, start, 8)
        assert bench.tokens[row][11:] == expected


def test_a_reused_row_and_its_reused_blocks_remember_nothing() -> None:
    config = CASES["qwen2, tied"]
    model = transformers_model(config)
    bench = Bench(checkpoint_of(model, config), engine_config(num_blocks=16, rows=2))
    bench.add(0, prompt(50, 7))
    bench.run(chunks=[Chunk(0, 0, 50, (0,))])
    bench.run(decode=[0])
    bench.worker.cache.layers[0].key.fill_(float("nan"))  # freed blocks are poison
    bench.worker.cache.layers[0].value.fill_(float("nan"))
    bench.release(0)
    again = prompt(9, 8)
    bench.add(0, again)
    bench.run(chunks=[Chunk(0, 0, 5)])
    bench.run(chunks=[Chunk(0, 5, 4, (0,))])
    for _ in range(7):
        bench.run(decode=[0])
    assert bench.tokens[0][9:] == greedy_reference(model, again, 8)[0]


def test_a_sequence_computed_again_after_preemption_goes_on_as_before() -> None:
    config = CASES["llama"]
    model = transformers_model(config)
    bench = Bench(checkpoint_of(model, config), engine_config())
    tokens = prompt(13, 9)
    bench.add(0, tokens)
    bench.run(chunks=[Chunk(0, 0, 13, (0,))])
    for _ in range(4):
        bench.run(decode=[0])
    known = list(bench.tokens[0])
    bench.release(0)
    bench.add(1, known)
    bench.run(chunks=[Chunk(1, 0, 9)])
    bench.run(chunks=[Chunk(1, 9, len(known) - 9, (1,))])
    bench.run(decode=[1])
    assert bench.tokens[1][13:] == greedy_reference(model, tokens, 7)[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_says_what_transformers_says(name: str) -> None:
    model = transformers_model(CASES[name])
    bench = Bench(checkpoint_of(model, CASES[name]), engine_config(device="cuda", block_size=16))
    prompts = {0: prompt(5), 1: prompt(37, 1), 2: prompt(90, 2)}
    for row, tokens in prompts.items():
        bench.add(row, tokens)
    bench.run(chunks=[Chunk(0, 0, 5, (0,)), Chunk(1, 0, 20)])
    bench.run(decode=[0], chunks=[Chunk(1, 20, 17, (1,)), Chunk(2, 0, 90, (2,))])
    for _ in range(9):
        bench.run(decode=[2, 0, 1])
    for row, tokens in prompts.items():
        expected, logits = greedy_reference(model, tokens, len(bench.tokens[row]) - len(tokens))
        torch.testing.assert_close(torch.stack(bench.sampler.seen[row]), logits, rtol=1e-3, atol=1e-3)
        assert bench.tokens[row][len(tokens) :] == expected

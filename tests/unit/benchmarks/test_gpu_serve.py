"""The server's GPU benchmark, as far as it can be held without one: its requests and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.serve import PEER, SHAPES, jobs_at
from benchmarks.gpu.tokenizer import write_tokenizer
from quire.serving.text.hf_tokenizer import build_hf_tokenizer

IDS = 522_319_834  # the sum of all prompt ids before they are shifted


def test_a_round_is_the_512_chats_that_the_peer_was_asked() -> None:
    jobs = jobs_at("inf", 512, 1)
    assert sum(len(job.prompt) for job in jobs) == 104_435
    assert sum(job.max_tokens for job in jobs) == 97_859
    assert sum(sum(map(int, job.prompt)) for job in jobs) == IDS + 200 * 104_435
    assert [job.arrival for job in jobs[:3]] == pytest.approx([0.002, 0.004, 0.006])


def test_rounds_share_lengths_but_no_prefix() -> None:
    first, second = jobs_at("20", 16, 1), jobs_at("40", 16, 2)
    assert [len(job.prompt) for job in first] == [len(job.prompt) for job in second]
    assert all(one.prompt[0] != other.prompt[0] for one, other in zip(first, second, strict=True))
    assert [job.arrival for job in first] == pytest.approx([2 * job.arrival for job in second])


def test_every_id_a_model_can_sample_is_text_of_its_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 2_000)
    tokenizer, _ = build_hf_tokenizer(tmp_path)
    assert tokenizer.get_vocab_size() == 2_000
    words = [tokenizer.decode([index]) for index in range(256, 2_000)]
    assert len(set(words)) == len(words)
    assert all(word.startswith(" ") and word.strip().isalpha() for word in words)


def test_prompts_stay_inside_every_vocabulary() -> None:
    rounds = max(map(len, PEER.values()))
    most = max(max(map(int, job.prompt)) for job in jobs_at("inf", 512, rounds))
    assert all(most < model.config["vocab_size"] for model in SHAPES.values())

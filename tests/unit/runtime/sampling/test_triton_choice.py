"""Tokens chosen by Triton kernels, against torch's choice, with the transforms and logprobs around them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.make import make_sampler
from quire.runtime.sampling.samples import Samples
from quire.runtime.sampling.triton_choice import TritonChoice
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Masks, NewRow
from tiny_models import DEVICE

VOCAB, ROWS = 150, 6
ASKED = [
    {"temperature": 0.0},
    {"temperature": 0.7, "frequency_penalty": 1.0, "logprobs": 3},
    {"temperature": 1.0, "top_k": 9, "logit_bias": {7: 4.0}},
    {"temperature": 1.2, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 0.0, "allowed_token_ids": [3, 5, 90], "logprobs": 0},
    {"temperature": 1.0},
]


def new_row(row: int, asked: dict[str, object], seed: int = 0) -> NewRow:
    tokens = np.array([row + 1, 2 * row + 3, 7], dtype=np.int32)
    return NewRow(row, tokens, 2, (), SamplingParams(**asked), TokenRules(), sample_index=row % 2, seed=seed)  # type: ignore[arg-type]


def history() -> TokenHistory:
    tokens = torch.zeros(ROWS, 8, dtype=torch.int32)
    for row in range(ROWS):
        tokens[row, :3] = torch.tensor([row + 1, 2 * row + 3, 7])
    lengths = torch.full((ROWS,), 3)
    return TokenHistory(tokens.to(DEVICE), lengths.to(DEVICE), (lengths - 1).to(DEVICE))


def samples(rows: list[int], lengths: list[int] | None = None, masks: Masks | None = None) -> Samples:
    known = np.full(len(rows), 3) if lengths is None else np.array(lengths)
    numbers = np.array(rows, dtype=np.int32)
    return Samples(numbers, known, torch.from_numpy(known).to(DEVICE), np.arange(len(rows)), masks)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 0], [4, 3]])
def test_it_chooses_what_torch_chooses_after_the_same_transforms(rows: list[int]) -> None:
    device = torch.device(DEVICE)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1)).mul(3).to(device)
    answers = []
    for kernels in ("torch", "triton"):
        sampler = make_sampler(ROWS, VOCAB, device, kernels)  # type: ignore[arg-type]
        for row, asked in enumerate(ASKED):
            sampler.add(new_row(row, asked, seed=row))
        sampled = sampler.sample(logits.clone(), samples(rows), history())
        sampler.check()
        told = sampled.report.logprobs
        ranks = [(each.row, each.entry.rank) for each in told.finish([tensor.cpu() for tensor in told.tensors])]
        answers.append((sampled.token_ids.tolist(), ranks))
    assert answers[1] == answers[0]


def test_logits_that_are_no_numbers_fail_their_row_alone() -> None:
    sampler = make_sampler(ROWS, VOCAB, torch.device(DEVICE), "triton")
    for row in (0, 1, 2):
        sampler.add(new_row(row, {"temperature": 0.5}))
    logits = torch.randn(3, VOCAB, device=DEVICE)
    logits[1, 5], logits[2] = float("nan"), float("-inf")
    found = sampler.sample(logits, samples([0, 1, 2]), history()).token_ids.tolist()
    assert found[0] >= 0
    assert found[1:] == [-1, -2]


def test_parameters_go_up_together_with_the_next_choice_and_only_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = TritonChoice(ROWS, VOCAB, torch.device(DEVICE))
    choice.add(new_row(0, {"temperature": 0.3, "top_k": 4}))
    choice.add(new_row(1, {"temperature": 0.4, "top_k": VOCAB}))
    assert [choice.needs_top_k_top_p(np.array([row])) for row in (0, 1)] == [True, False]
    choice.remove(0)
    choice.add(new_row(0, {"temperature": 0.9, "min_p": 0.5}))
    sent: list[int] = []
    send = choice._uploader.upload
    monkeypatch.setattr(choice._uploader, "upload", lambda *arrays: sent.append(len(arrays)) or send(*arrays))
    choice.upload_parameters()
    choice.upload_parameters()
    assert len(sent) == 1
    parameters = choice._parameters
    torch.testing.assert_close(parameters.temperature[:3].cpu(), torch.tensor([0.9, 0.4, 0.0]))
    assert parameters.top_k[:2].tolist() == [0, VOCAB]
    torch.testing.assert_close(parameters.log_min_p[0].cpu().exp(), torch.tensor(0.5))
    assert not choice.needs_top_k_top_p(np.array([0, 1]))
    choice.check()


def test_rows_that_only_choose_are_told_from_those_that_ask_for_more() -> None:
    sampler = make_sampler(ROWS, VOCAB, torch.device(DEVICE), "triton")
    for row, asked in enumerate(ASKED):
        sampler.add(new_row(row, asked))
    assert sampler.only_chooses(np.array([0, 3, 5]))
    assert sampler.num_listed(np.array([0, 2, 3, 5])) == -1
    assert sampler.num_listed(np.array([0, 4])) == 0
    assert sampler.num_listed(np.array([0, 4, 1])) == 3
    for row in (1, 2, 4):
        assert not sampler.only_chooses(np.array([0, row]))
        sampler.remove(row)
    assert sampler.only_chooses(np.array([0, 1, 2, 3, 4, 5]))
    sampler.add(new_row(1, {"logprobs": 1})._replace(num_candidates=6))
    assert sampler.num_listed(np.array([0, 1])) == 6
    sampler.add(new_row(2, {"logprobs": 1, "logprob_token_ids": [4]}))
    assert sampler.num_listed(np.array([1, 2])) is None

"""Sampling on the device against plain torch and against the runtime's sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quire.kernels.reference import sampling as reference
from quire.kernels.reference.sampling import Parameters
from quire.kernels.triton import sampling, sampling_filters
from quire.kernels.triton.penalties import RowPenalties, penalize
from quire.kernels.triton.sampling import SampleSpace, append_tokens, sample
from quire.kernels.triton.sampling_weights import RowParameters, RowTokens
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.rng import stream_start
from quire.runtime.sampling.sampler import Sampler
from quire.runtime.sampling.samples import Samples
from quire.types.sampling import SamplingParams
from quire.types.step import NewRow, TokenRules
from triton_cases import DEVICE, DTYPES, ON_GPU, rand

VOCAB = 50_000 if ON_GPU else 700
CASES = [(dtype, 4.0) for dtype in DTYPES] + [(torch.float32, 0.0)]
if not ON_GPU:
    CASES = [(torch.float32, 4.0), (torch.float16, 0.0)]
HOW = [
    Parameters(),
    Parameters(temperature=1.0, stream=3),
    Parameters(temperature=0.6, stream=-(2**62)),
    Parameters(temperature=1.3, min_p=0.05, stream=5),
    Parameters(temperature=1.0, top_k=40, stream=6),
    Parameters(temperature=0.8, top_k=1, stream=7),
    Parameters(temperature=2.0, top_k=VOCAB - 1, stream=8),
    Parameters(temperature=1.0, top_k=VOCAB, stream=9),
    Parameters(temperature=0.7, top_p=0.9, stream=10),
    Parameters(temperature=3.0, top_p=0.999, stream=11),
    Parameters(temperature=1.0, top_p=1e-9, stream=12),
    Parameters(temperature=1.0, top_k=50, top_p=0.5, min_p=0.01, stream=13),
    Parameters(temperature=1e-30, stream=14),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, several tiles and chunks of a small vocabulary."""
    if not ON_GPU:
        monkeypatch.setattr(sampling, "TILE", 256)
        monkeypatch.setattr(sampling, "_CHUNK", 512)
        monkeypatch.setattr(sampling_filters, "MOST_CANDIDATES", 256)
        monkeypatch.setattr(sampling_filters, "FEW_CANDIDATES", 64)


def _on_device(how: Sequence[Parameters]) -> RowParameters:
    found = RowParameters.make(len(how), DEVICE)
    for row, one in enumerate(how):
        found.temperature[row], found.top_k[row], found.top_p[row] = one.temperature, one.top_k, one.top_p
        found.log_min_p[row] = math.log(one.min_p) if one.min_p else -math.inf
        found.stream[row] = one.stream
    return found


def _history(num_rows: int, capacity: int = 16, vocab: int = VOCAB) -> RowTokens:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, vocab, (num_rows, capacity), dtype=torch.int32, generator=generator)
    lengths = torch.arange(num_rows) % (capacity - 1) + 1
    return RowTokens(tokens.to(DEVICE), lengths.to(DEVICE), ((lengths + 1) // 2).to(DEVICE))


def _sampled(
    logits: torch.Tensor, rows: Sequence[int], parameters: RowParameters, history: RowTokens, filtered: bool = True
) -> list[int]:
    space = SampleSpace.make(len(rows), logits.shape[1], DEVICE, filtered=filtered)
    out = torch.full((len(rows),), 77, dtype=torch.int64, device=DEVICE)
    where = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    sample(logits, where, history.lengths[where.long()], parameters, history.num_prompt, space, out)
    return out.tolist()


def _wanted(logits: torch.Tensor, rows: Sequence[int], how: Sequence[Parameters], history: RowTokens) -> list[int]:
    num_outputs = (history.lengths - history.num_prompt).tolist()
    return [reference.sample(line, how[row], num_outputs[row]) for line, row in zip(logits, rows, strict=True)]


@pytest.mark.parametrize(("dtype", "scale"), CASES)
def test_every_way_of_choosing_gives_the_token_of_the_reference(dtype: torch.dtype, scale: float) -> None:
    rows = [*range(len(HOW)), 4, 8]  # scale 0: all logits are equal, and only ids rank them
    logits, history = rand(len(rows), VOCAB, dtype=dtype, seed=1, scale=scale), _history(len(HOW))
    assert _sampled(logits, rows, _on_device(HOW), history) == _wanted(logits, rows, HOW, history)


@pytest.mark.parametrize("most", [128, 2])
def test_a_row_with_too_many_candidates_is_searched_by_bins_and_then_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(sampling_filters, "MOST_CANDIDATES", most)
    how = [
        Parameters(temperature=1.0, top_k=VOCAB // 2, stream=1),
        Parameters(temperature=1.0, top_p=0.8, stream=2),
        Parameters(temperature=1.5, top_k=VOCAB // 3, top_p=0.9, stream=3),
    ]
    rows = [0, 1, 2, 1]
    logits, history, parameters = rand(4, VOCAB, seed=2), _history(3), _on_device(how)
    wanted = _wanted(logits, rows, how, history)
    space = SampleSpace.make(4, VOCAB, DEVICE, filtered=True)
    out = torch.empty(4, dtype=torch.int64, device=DEVICE)
    where = torch.tensor(rows, device=DEVICE)
    sample(logits, where, history.lengths[where], parameters, history.num_prompt, space, out)
    assert out.tolist() == wanted
    assert space.filters is not None
    assert not any(memory.any() for memory in space.filters[:-1])


def test_a_list_that_runs_over_is_left_for_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that min_p drops by a hair are not counted, but listed: raw logits are not told apart as finely."""
    monkeypatch.setattr(sampling_filters, "MOST_CANDIDATES", 64)
    logits = torch.full((3, VOCAB), -1.0000004, device=DEVICE)
    logits[:, 100:105] = torch.tensor([-0.5, 0.0, -0.25, 0.0, -1.0], device=DEVICE)
    how = [
        Parameters(temperature=1.0, top_k=3, min_p=math.exp(-1.0), stream=1),
        Parameters(temperature=1.0, top_k=100, top_p=0.9, min_p=math.exp(-1.0), stream=2),
        Parameters(temperature=1.0, top_p=0.95, min_p=math.exp(-1.0), stream=3),
    ]
    history = _history(3)
    assert _sampled(logits, [0, 1, 2], _on_device(how), history) == _wanted(logits, [0, 1, 2], how, history)


def test_the_runtime_sampler_and_the_kernels_draw_the_same_tokens() -> None:
    how = [one for one in HOW if one.temperature > 0.001]
    logits, history = rand(len(how), VOCAB, seed=3, scale=2.0), _history(len(how))
    sampler, parameters = Sampler(len(how), VOCAB, DEVICE), _on_device(how)
    for row, one in enumerate(how):
        length, prompt = int(history.lengths[row]), int(history.num_prompt[row])
        params = SamplingParams(
            temperature=one.temperature, top_k=one.top_k, top_p=max(one.top_p, 1e-6), min_p=one.min_p
        )
        parameters.top_p[row] = params.top_p
        known = np.arange(length, dtype=np.int32)
        sampler.add(NewRow(row, known, prompt, (), params, TokenRules(), row, row * 1000))
        parameters.stream[row] = stream_start(row * 1000, row)
    rows = np.arange(len(how), dtype=np.int32)
    samples = Samples(rows, history.lengths.cpu().numpy(), history.lengths, np.arange(len(rows)))
    wanted = sampler.sample(logits.clone(), samples, TokenHistory(*history)).token_ids
    assert _sampled(logits, rows.tolist(), parameters, history) == wanted.tolist()


def test_a_row_that_comes_with_several_lengths_draws_what_it_would_after_so_many_tokens() -> None:
    rows, lengths = [3, 3, 3, 1, 8, 8], [5, 6, 7, 4, 4, 9]
    logits, history = rand(6, VOCAB, seed=5, scale=2.0), _history(len(HOW))
    space = SampleSpace.make(6, VOCAB, DEVICE, filtered=True)
    out = torch.empty(6, dtype=torch.int64, device=DEVICE)
    known = torch.tensor(lengths, device=DEVICE)
    sample(logits, torch.tensor(rows, device=DEVICE), known, _on_device(HOW), history.num_prompt, space, out)
    num_prompt = history.num_prompt.tolist()
    wanted = [
        reference.sample(line, HOW[row], length - num_prompt[row])
        for line, row, length in zip(logits, rows, lengths, strict=True)
    ]
    assert out.tolist() == wanted


def test_a_batch_without_filters_needs_no_space_for_them() -> None:
    rows = [0, 1, 2, 3]
    logits, history = rand(4, VOCAB, seed=4), _history(len(HOW))
    found = _sampled(logits, rows, _on_device(HOW), history, filtered=False)
    assert found == _wanted(logits, rows, HOW, history)


def test_a_token_depends_on_its_own_row_and_place_alone() -> None:
    logits, history, parameters = rand(1, VOCAB, seed=5), _history(len(HOW)), _on_device(HOW)
    alone = _sampled(logits, [9], parameters, history)
    others = rand(3, VOCAB, seed=6)
    among = _sampled(torch.cat((others, logits)), [4, 2, -1, 9], parameters, history)
    assert among[3] == alone[0]
    history.lengths[9] += 1
    later = _sampled(logits, [9], parameters, history)
    assert later == _wanted(logits, [9], HOW, history)


def test_padding_gets_token_zero_and_reads_nothing() -> None:
    logits = torch.full((2, VOCAB), math.nan, device=DEVICE)
    assert _sampled(logits, [-1, -1], _on_device(HOW), _history(len(HOW))) == [0, 0]


@pytest.mark.parametrize("row", [0, 1, 4, 8])
@pytest.mark.parametrize(("value", "mark"), [(math.nan, -1), (math.inf, -1), (-math.inf, -2)])
def test_a_row_without_a_finite_best_logit_is_marked(row: int, value: float, mark: int) -> None:
    logits = rand(1, VOCAB) if mark == -1 else torch.full((1, VOCAB), -math.inf, device=DEVICE)
    logits[0, VOCAB - 3] = value
    assert _sampled(logits, [row], _on_device(HOW), _history(len(HOW))) == [mark]


@pytest.mark.parametrize("row", [0, 1, 4, 6, 8])
def test_a_token_that_is_forbidden_is_never_chosen(row: int) -> None:
    logits = torch.full((1, VOCAB), -math.inf, device=DEVICE)
    logits[0, VOCAB - 9] = 1.0
    assert _sampled(logits, [row], _on_device(HOW), _history(len(HOW))) == [VOCAB - 9]


def test_rows_grow_by_their_tokens_and_marks_are_kept_as_zero() -> None:
    history = RowTokens(
        torch.full((4, 6), 9, dtype=torch.int32, device=DEVICE),
        torch.tensor([2, 5, 0, 6], device=DEVICE),
        torch.zeros(4, dtype=torch.int64, device=DEVICE),
    )
    rows = torch.tensor([1, -1, 0, 3], dtype=torch.int32, device=DEVICE)
    append_tokens(rows, torch.tensor([42, 5, -2, 8], device=DEVICE), history)
    assert history.lengths.tolist() == [3, 6, 0, 7]
    assert history.tokens.tolist() == [[9, 9, 0, 9, 9, 9], [9, 9, 9, 9, 9, 42], [9] * 6, [9] * 6]


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_change_the_tokens_of_a_history_and_no_others(dtype: torch.dtype) -> None:
    values = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, -0.4), (0.7, 0.3, 0.2)]
    history, penalties = _history(len(values), vocab=6), RowPenalties.make(len(values), DEVICE)
    for row, line in enumerate(values):
        history.lengths[row], history.num_prompt[row] = 12, 5
        for column, value in zip(penalties, line, strict=True):
            column[row] = value
    rows = [4, 3, -1, 2, 1, 0]
    logits = rand(len(rows), 40, dtype=dtype, seed=9)
    out = torch.empty(len(rows), 40, device=DEVICE)
    penalize(logits, torch.tensor(rows, device=DEVICE), penalties, history, out)
    for row, line, found in zip(rows, logits, out, strict=True):
        tokens = history.tokens[row, :12].tolist()
        wanted = line.float() if row < 0 else reference.penalize(line, tokens, 5, values[row])
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)

"""Mamba layers (the first Mamba) by the compiled kernels, against their definition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from delta_cases import NUM_TOKENS, SEGMENTS
from quire.kernels.native import loader
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.program import ProgramWriter
from quire.kernels.native.structures import ProgramStep
from quire.kernels.recurrent import SAME_RUN, RecurrentSizes
from quire.kernels.selective import SelectiveWeights
from selective_cases import rows_of, scanned

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
SIZES = [RecurrentSizes(0, 96, 16, 1, 4), RecurrentSizes(0, 70, 6, 1, 2), RecurrentSizes(0, 3, 41, 1, 4)]
ROUGH = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
Segments = list[tuple[int, ...]]


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    loader.set_threads(before)


def run(
    rows: list[Tensor], weights: SelectiveWeights, state: Tensor, segments: Segments, sizes: RecurrentSizes
) -> Tensor:
    """Run the operation. The stream holds all inputs, side by side; Python operations take them apart."""
    channels, found = sizes.channels, []
    mixed, pace, keys, gate = rows
    x = torch.cat((mixed, pace, keys, mixed, gate), dim=1)
    writer = ProgramWriter(x.dtype, x.shape[1])
    ends = np.cumsum([0, channels, channels, keys.shape[1], 2 * channels])
    parts = [
        writer.call(lambda x, _, begin=begin, end=end: x[:, begin:end], (writer.stream,), int(end - begin))
        for begin, end in pairwise(ends)
    ]
    out = writer.selective(*parts, 0, sizes, weights)
    writer.call(lambda made, _: found.append(made.clone()) or made, (out,), channels)
    nothing = torch.empty(0, dtype=torch.int64)
    step = ProgramStep(
        (nothing,), (nothing,), nothing.view(0, 4), None, [(torch.empty(0), torch.empty(0))], (), None,
        states=(state,), segments=np.array(segments, dtype=np.int64),
    )  # fmt: skip
    writer.finish(writer.stream).run(x, step)
    return found[0]


@pytest.mark.parametrize("dtype", ROUGH)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tokens_and_states_are_those_of_the_definition(sizes: RecurrentSizes, dtype: torch.dtype) -> None:
    rows, weights, state = rows_of(sizes, dtype)
    out, after = scanned(rows, weights, state, SEGMENTS, sizes)
    found = run(rows, weights, state, SEGMENTS, sizes)
    torch.testing.assert_close(found.double(), out, rtol=10 * ROUGH[dtype], atol=ROUGH[dtype])
    torch.testing.assert_close(state.double(), after, rtol=1e-4, atol=1e-5)


def test_step_sizes_are_exact_from_the_smallest_to_the_largest() -> None:
    """With an input and B of 1, no rate and no state before, a state is its step size."""
    sizes = RecurrentSizes(0, NUM_TOKENS, 1, 1, 2)
    pace = torch.linspace(-80.0, 40.0, NUM_TOKENS)[None]
    weights = SelectiveWeights(
        torch.zeros(2, NUM_TOKENS), None, torch.zeros(NUM_TOKENS, 1), torch.zeros(NUM_TOKENS), torch.zeros(NUM_TOKENS)
    )
    ones, state = torch.ones(1, NUM_TOKENS), torch.zeros(1, sizes.state_numbers)
    run([ones, pace, torch.ones(1, 2), ones], weights, state, [(0, 1, -1, 0)], sizes)
    wanted = torch.logaddexp(torch.zeros(()).double(), pace[0].double())
    torch.testing.assert_close(state[0, :NUM_TOKENS].double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ROUGH)
def test_tokens_do_not_depend_on_how_a_run_is_cut_nor_on_other_rows(dtype: torch.dtype) -> None:
    outs, states, sizes = [], [], SIZES[1]
    for segments in (SEGMENTS, [(3, 17, -1, 0), (20, 23, SAME_RUN, 0)], [(3, 40, -1, 0)]):
        rows, weights, state = rows_of(sizes, dtype)
        outs.append(run(rows, weights, state, segments, sizes)[3:43])
        states.append(state[0, : sizes.matrix_numbers])
    rows, weights, state = rows_of(sizes, dtype)
    first = run(rows, weights, state, [(3, 11, -1, 6)], sizes)[3:14]  # a later step continues from a slot
    second = run(rows, weights, state, [(14, 29, 6, 0)], sizes)[14:43]
    outs.append(torch.cat((first, second)))
    states.append(state[0, : sizes.matrix_numbers])
    for out, kept in zip(outs[1:], states[1:], strict=True):
        assert torch.equal(out, outs[0])
        assert torch.equal(kept, states[0])


@pytest.mark.usefixtures("_threads_as_before")
def test_tokens_do_not_depend_on_the_number_of_threads() -> None:
    sizes = RecurrentSizes(0, 600, 16, 1, 4)
    outs = []
    for threads in (3, 1):
        loader.set_threads(threads)
        rows, weights, state = rows_of(sizes, torch.float32)
        outs.append((run(rows, weights, state, SEGMENTS, sizes)[:NUM_TOKENS], state))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])

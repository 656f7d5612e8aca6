"""Arrays uploaded to a device arrive unchanged, however often the staging memory is reused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.runtime.transfer import Uploader
from tiny_models import DEVICE

DTYPES = [np.int32, np.int64, np.float32, np.float64]


def test_arrays_of_any_kind_arrive_together() -> None:
    uploader = Uploader(torch.device(DEVICE))
    arrays = [np.arange(n * 3).reshape(n, 3).astype(dtype) for n, dtype in zip((1, 0, 5, 7), DTYPES, strict=True)]
    arrays.append(arrays[3][::2, 1])  # with gaps
    sent = uploader.upload(*arrays)
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.device.type == DEVICE.partition(":")[0]
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
        assert tensor.cpu().numpy().dtype == array.dtype


def test_many_uploads_in_a_row_do_not_mix() -> None:
    uploader = Uploader(torch.device(DEVICE))
    sent = [uploader.upload(np.full(1 + 5_000 * (i % 3), i, dtype=np.int64))[0] for i in range(40)]
    target = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    copies = []
    for i in range(20):
        uploader.upload_into(target, np.full(4, i, dtype=np.int32))
        copies.append(target.clone())
    assert all((tensor == i).all() for i, tensor in enumerate(sent))
    assert all((tensor == i).all() for i, tensor in enumerate(copies))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tokens_of_several_steps_in_flight_do_not_mix() -> None:
    from quire.runtime.executor.pinned_results import PinnedResults

    results, source = PinnedResults(8), torch.zeros(8, dtype=torch.int64, device="cuda")
    scores = torch.zeros(40, 3, device="cuda")  # more than a buffer has room for at first
    buffers = []
    for step in range(3):
        source.fill_(step)  # each step overwrites the numbers of the one before
        scores.fill_(step / 2)
        buffers.append(results.send((source[: step + 1], scores)))
    for step, buffer in enumerate(buffers):
        token_ids, also = buffer.read()
        assert token_ids.tolist() == [step] * (step + 1)
        assert also.tolist() == [[step / 2] * 3] * 40
        results.give_back(buffer)
    again = results.send((source,))
    assert again in buffers
    assert [tensor.tolist() for tensor in again.read()] == [[2] * 8]

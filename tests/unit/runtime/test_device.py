"""The device of a configuration, as torch takes it."""

from __future__ import annotations

import pytest
import torch
from torch.cuda._utils import _get_device_index

from quire.runtime.device import torch_device


def test_a_gpu_without_a_number_is_the_first_one() -> None:
    assert torch_device("cuda") == torch_device("cuda:0") == torch.device("cuda", 0)
    assert torch_device("cuda:3") == torch.device("cuda", 3)
    assert torch_device("cpu") == torch.device("cpu")


def test_torch_takes_it_where_an_index_is_asked_for() -> None:
    """torch.cuda.set_device looks the index up so, also on a machine without a GPU."""
    with pytest.raises(ValueError, match="with a specified index"):
        _get_device_index(torch.device("cuda"))
    assert [_get_device_index(torch_device(name)) for name in ("cuda", "cuda:2")] == [0, 2]

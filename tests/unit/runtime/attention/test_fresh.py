"""Prompts over keys that were just made: wired as torch wants it, and on a GPU against the same in float32."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from quire.config.model import Heads
from quire.runtime.attention import fresh
from quire.runtime.attention.fresh import LEAST_TOKENS, CudnnFresh, NoFresh, choose_fresh
from quire.runtime.layers.weights import Placement
from tiny_models import DEVICE

HEADS = Heads(num_query=4, num_kv=2, dim=64)
SCALE = 0.2


def of_one_product(num_tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Query, key and value as a layer has them: beside each other in the rows of one tensor."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_tokens, HEADS.num_query + 2 * HEADS.num_kv, HEADS.dim, generator=generator)
    return torch.split(rows.to(device, dtype), [HEADS.num_query, HEADS.num_kv, HEADS.num_kv], dim=1)


def truth(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # [tokens, query heads, dim]
    query, key, value = (tensor.float().transpose(0, 1) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)
    return out.transpose(0, 1)


def test_tokens_see_themselves_and_those_before_them_under_the_scale_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def instead(kernel: object) -> AbstractContextManager[None]:
        asked.append(kernel)
        return nullcontext()

    monkeypatch.setattr(fresh, "sdpa_kernel", instead)
    tensors = of_one_product(9, torch.float32, "cpu")
    found = CudnnFresh(SCALE)(*tensors)
    torch.testing.assert_close(found, truth(*tensors))
    assert asked == [SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize(
    ("placement", "dim"),
    [
        (Placement(torch.bfloat16, torch.device("cpu")), 64),
        (Placement(torch.float32, torch.device("cuda")), 64),
        (Placement(torch.bfloat16, torch.device("cuda")), 256),
    ],
)
def test_where_no_library_can_run_no_prompt_is_long_enough(placement: Placement, dim: int) -> None:
    chosen = choose_fresh(Heads(4, 2, dim), SCALE, placement)
    assert isinstance(chosen, NoFresh)
    assert chosen.least_tokens == sys.maxsize


@pytest.mark.skipif(DEVICE == "cpu", reason="cuDNN runs on CUDA devices")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_it_gives_what_float32_gives_and_copies_nothing(dtype: torch.dtype) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # as every executor in this process does
    chosen = choose_fresh(HEADS, SCALE, Placement(dtype, torch.device(DEVICE)))
    assert isinstance(chosen, CudnnFresh)
    tensors = of_one_product(LEAST_TOKENS + 128, dtype, DEVICE)
    found = chosen(*tensors)
    assert found.is_contiguous()
    torch.testing.assert_close(found.float(), truth(*tensors), rtol=2e-2, atol=2e-2)
    assert not torch.backends.cuda.cudnn_sdp_enabled()

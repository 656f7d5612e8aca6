"""What the device of the tests promises of one computation in different batches, in one place.

A CPU gives a row the same bits whatever rows are beside it. A GPU multiplies few rows by other kernels than many, which
add in another order; a value that is then quantized may be rounded to the next level. So tests ask here what they may
compare exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tiny_models import DEVICE

IS_EXACT = DEVICE == "cpu"
LOGPROB_ERROR = 1e-4  # of a sequence's logprob in float32
Number = TypeVar("Number", int, float)
Step = tuple[int, dict[int, float]]  # a token, and logprobs by token


def tolerance(cpu: Number, gpu: Number) -> Number:
    """Return the error that a comparison may have on the device of the tests."""
    return cpu if IS_EXACT else gpu


def keeps_tokens(kv_dtype: str | None = None, quantization: str | None = None) -> bool:
    """Whether a request gets the same tokens in every batch, with logprobs that differ by LOGPROB_ERROR at most."""
    return IS_EXACT or (kv_dtype in (None, "float32") and quantization is None)


def quantized_error(quantization: str | None) -> float:
    """Return by how much the logprobs of a tiny model differ at most, on average, where levels are rounded otherwise.
    Answers to different prompts differ by 0.4 to 1.0. In float8, activations may choose other experts."""
    return 0.8 if quantization == "fp8" else 0.3


def check_same(found: Sequence[Sequence[Step]], wanted: Sequence[Sequence[Step]]) -> None:
    """Compare answers of float32 models with their logprobs: exactly on a CPU, with the same tokens elsewhere."""
    if IS_EXACT:
        assert found == wanted
        return
    assert [[token for token, _ in answer] for answer in found] == [[token for token, _ in answer] for answer in wanted]
    steps = [(one, other) for pair in zip(found, wanted, strict=True) for one, other in zip(*pair, strict=True)]
    for (_, one), (_, other) in steps:  # best first; equal ones may change places
        np.testing.assert_allclose(sorted(one.values()), sorted(other.values()), rtol=0, atol=LOGPROB_ERROR)

"""Errors in other processes."""

from __future__ import annotations

import pickle

import pytest

from quire.types.errors import ConfigError, DoesNotFit, EngineDead, InvalidRequest, ModelLoadError, QuireError


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("max_tokens", "must be at least 1", "raise it"),
        ConfigError("dtype", "is unknown"),
        DoesNotFit("kv_cache_memory", "does not fit", "lower it"),
        ModelLoadError("a.gguf", "is cut off", tensor="output", fix="download it again"),
        EngineDead("the executor failed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_whole_out_of_another_process(error: QuireError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))

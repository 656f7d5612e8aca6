"""Engine flags become engine settings, and only those that were given."""

from __future__ import annotations

import argparse

import pytest

from quire.config.arguments import EngineArguments
from quire.serving.cli.arguments import add_engine, engine_settings


def settings(*flags: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_engine(parser)
    return dict(engine_settings(parser.parse_args(flags)))


def test_a_switch_is_off_unless_given() -> None:
    assert settings() == {}
    assert settings("--enforce-eager") == {"enforce_eager": True}
    assert settings("--block-size", "32", "--enforce-eager") == {"block_size": 32, "enforce_eager": True}
    assert EngineArguments(**settings("--enforce-eager")).enforce_eager  # type: ignore[arg-type]
    assert not EngineArguments().enforce_eager


def test_the_prefix_cache_is_left_to_the_engine_unless_it_is_turned_on_or_off() -> None:
    assert settings() == {}
    assert settings("--enable-prefix-caching") == {"enable_prefix_caching": True}
    assert settings("--no-enable-prefix-caching") == {"enable_prefix_caching": False}


def test_float8_is_asked_for_by_two_flags() -> None:
    given = settings("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3")
    assert given == {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}
    assert (EngineArguments().quantization, EngineArguments().kv_cache_dtype) == (None, "auto")


def test_speculation_is_asked_for_by_a_json_object() -> None:
    given = settings("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')
    assert given == {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}


@pytest.mark.parametrize("text", ["ngram", "[1]", '{"method"'])
def test_speculation_that_is_no_json_object_is_refused_in_one_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings("--speculative-config", text)
    assert "no JSON" in capsys.readouterr().err

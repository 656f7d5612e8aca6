"""Engine flags become engine settings, and only those that were given."""

from __future__ import annotations

import argparse

from quire.config.resolve import EngineArguments
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

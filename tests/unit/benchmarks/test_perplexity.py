"""The perplexity benchmark on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.perplexity import main
from tiny_served import write_tiny_model


def test_every_kind_of_quantization_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny", max_length=128)
    text = tmp_path / "text.txt"
    text.write_text("a short text that is read in windows of twenty tokens, again and again", encoding="utf-8")
    flags = ["--tokens", "50", "--window", "20", "--device", "cpu", "--dtype", "float32", "--load-format", "dummy"]
    found = main([
        "--model", str(model), "--text", str(text), "--quantization", "none,int8,int4", "--json",
        str(tmp_path / "figures.json"), *flags,
    ])  # fmt: skip
    assert [each.quantization for each in found] == ["none", "int8", "int4"]
    plain = found[0].perplexity
    assert 100 < plain < 1000, "a random model of 259 tokens knows nothing"
    for each in found[1:]:
        assert 0 < abs(math.log(each.perplexity / plain)) < 0.05
    assert len(json.loads((tmp_path / "figures.json").read_text())) == 3
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "tiny" in line]
    assert [words[3] for words in lines] == ["none", "int8", "int4"]


def test_every_dtype_of_the_cache_has_a_line(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", max_length=128)
    text = tmp_path / "text.txt"
    text.write_text("a short text that is read in windows of twenty tokens, again and again", encoding="utf-8")
    flags = ["--tokens", "50", "--window", "20", "--device", "cpu", "--dtype", "float32", "--load-format", "dummy"]
    found = main(["--model", str(model), "--text", str(text), "--kv-cache-dtype", "auto,fp8,int8,int4", *flags])
    assert [each.kv_cache_dtype for each in found] == ["auto", "fp8", "int8", "int4"]
    plain, *others = found
    for each in others:
        assert 0 < abs(math.log(each.perplexity / plain.perplexity)) < 0.05
        assert each.token_bytes < plain.token_bytes


def test_an_unknown_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), "--quantization", "int3"])
    assert "unknown quantization int3; choose from none, fp8, int8, int4" in capsys.readouterr().err

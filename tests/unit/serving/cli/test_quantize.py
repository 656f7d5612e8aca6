"""`quire quantize`: a text calibrates, and the folder it writes is served like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import transformers

from family_bench import hf_model
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.serving.cli import main
from quire.serving.cli.quantize import _choose_device
from quire.types.errors import ConfigError
from tiny_served import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), max_length=128)
    hf_model(transformers.AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have multiples of 32 inputs."""
    folder = write_tiny_model(tmp_path_factory.mktemp("wide"), max_length=128)
    hf_model(transformers.AutoConfig.from_pretrained(folder, intermediate_size=64)).save_pretrained(folder)
    return folder


def test_a_calibrated_checkpoint_is_written_with_its_tokenizer(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, target = tmp_path / "text.txt", tmp_path / "small"
    text.write_text("a text that the model reads in windows of thirty two tokens, again and again" * 3)
    flags = ["--calibration", str(text), "--calibration-window", "32", "--calibration-tokens", "100"]
    assert main(["quantize", "--model", str(wide), "--output", str(target), "--method", "int4", "--group-size", "32",
                 "--device", "cpu", *flags]) == 0  # fmt: skip
    said = capsys.readouterr()
    assert f"14 matrices quantized to int4: {target}" in said.out
    assert "quantizing blocks: 2/2" in said.err
    assert "GPTQ over 96 tokens of calibration text" in (target / "README.md").read_text()
    assert (target / "tokenizer.json").read_bytes() == (wide / "tokenizer.json").read_bytes()
    assert open_checkpoint(files_at(target)).config.quantization == "compressed-tensors"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--method", "int4"], "group_size: groups of 32 do not divide the 48 inputs of model.layers.0.mlp.down_proj"),
        (["--method", "int4", "--group-size", "16"], "group_size: must be a multiple of 32, is 16; use 32, 64 or 128"),
        (["--method", "int8", "--calibration", "missing.txt"], "calibration: missing.txt cannot be read"),
        (["--method", "int8", "--device", "nonsense"], "device: 'nonsense' is unknown; use cpu, cuda, cuda:N or auto"),
        (["--method", "int8", "--device", "meta"], "device: 'meta' is unknown; use cpu, cuda, cuda:N or auto"),
        (["--method", "int8", "--device", "cuda:99"], "device: cuda:99 is not there: torch sees "),
        (["--method", "int8", "--output", __file__], f"output: {__file__} is there already; give a folder"),
        (["--method", "int8", "--output", f"{__file__}/small"], "/small cannot be written: [Errno 20] Not a directory"),
        (["--method", "int8", "--head"], "head: the model's head is its embedding table"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    model: Path, tmp_path: Path, flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "--model", str(model), "--output", str(tmp_path / "small"), *flags]) == 2
    assert problem in capsys.readouterr().err


def test_a_device_is_one_that_the_machine_has() -> None:
    assert [_choose_device("auto", count) for count in (0, 2)] == ["cpu", "cuda"]
    assert [_choose_device(name, 2) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda:1"]
    with pytest.raises(
        ConfigError, match=r"^device: cuda:2 is not there: torch sees 2 GPUs; use cuda:0 to cuda:1, cpu"
    ):
        _choose_device("cuda:2", 2)
    with pytest.raises(ConfigError, match=r"^device: cuda is not there: torch sees 0 GPUs; use cpu or auto"):
        _choose_device("cuda", 0)

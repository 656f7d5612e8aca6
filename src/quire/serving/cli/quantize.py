"""`quire quantize`: writes a checkpoint with quantized matrices, for Quire and other engines."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from quire.serving.cli.arguments import Commands, OneLineParser, add_debug, examples
from quire.types.errors import ConfigError

_FEWEST_TOKENS = 16  # of a calibration text


def add_quantize(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a quantized checkpoint of a model",
        description="Quantize the matrices of a safetensors checkpoint and write them to a new folder in the "
        "compressed-tensors format. The embedding, the output head and norms are not quantized.",
        **examples(
            {
                "quire quantize --model org/name --output DIR --method int4 --calibration text.txt": "GPTQ: 4-bit "
                "weights whose rounding errors compensate each other on the calibration text",
                "quire quantize --model org/name --output DIR --method fp8": "8-bit floats, without calibration",
                "quire serve DIR": "serve the quantized model",
            }
        ),
    )
    parser.add_argument(
        "-m", "--model", required=True, help="the model to quantize: a folder with safetensors files, or a hub name"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the checkpoint; it must be empty or not exist"
    )
    parser.add_argument(
        "--method", choices=("int4", "int8", "fp8"), required=True,
        help="int4: 4-bit weights (W4A16); int8: 8-bit weights and activations (W8A8); fp8: W8A8 in float8",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="text file for calibration, like the texts the model will see"
    )
    parser.add_argument("--calibration-tokens", type=int, default=16_384, help="tokens of --calibration to use (16384)")
    parser.add_argument(
        "--calibration-window", type=int, default=512, help="tokens of each piece into which --calibration is cut (512)"
    )
    parser.add_argument(
        "--group-size", type=int,
        help="int4: inputs that share a scale, a multiple of 32 (128, 64 or 32, whichever divides all matrices)",
    )  # fmt: skip
    parser.add_argument(
        "--fp8-scales", choices=("channel", "tensor", "block"), default="channel",
        help="fp8: what shares a scale: each output channel, the whole tensor, or each block of 128 x 128 (channel)",
    )  # fmt: skip
    parser.add_argument(
        "--head", action="store_true", help="quantize the output head too, which not all engines can read"
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="device for the computation: cpu, cuda, cuda:N, or auto (a GPU if there is one) (auto)",
    )
    add_debug(parser)


def run_quantize(args: argparse.Namespace) -> int:
    """Quantize a model. Raises QuireError for a model or settings that cannot be quantized."""
    import torch

    from quire.runtime.device import torch_device
    from quire.runtime.loading.model_config import read_model_config
    from quire.runtime.loading.resolve import resolve_model
    from quire.runtime.models.registry import check_generates
    from quire.runtime.quantized_checkpoints.checkpoint import Recipe, write_quantized

    device = torch_device(_choose_device(args.device, torch.cuda.device_count() if torch.cuda.is_available() else 0))
    files = resolve_model(args.model)
    check_generates(read_model_config(files).architecture)
    texts = [] if args.calibration is None else _read_texts(args)
    recipe = Recipe(args.method, args.group_size, args.head, texts, args.fp8_scales)
    count = write_quantized(files, args.output, recipe, device, _report)
    print(f"{count} matrices quantized to {args.method}: {args.output}")
    return 0


def _choose_device(name: str, num_gpus: int) -> str:
    """Return `name` if this machine has the device; for "auto", a GPU if there is one."""
    if name == "auto":
        return "cuda" if num_gpus else "cpu"
    found = re.fullmatch(r"cpu|cuda(?::([0-9]+))?", name)
    if found is None:
        raise ConfigError("device", f"{name!r} is unknown", "use cpu, cuda, cuda:N or auto")
    if name != "cpu" and int(found[1] or 0) >= num_gpus:
        fix = "use cpu or auto" if num_gpus == 0 else f"use cuda:0 to cuda:{num_gpus - 1}, cpu or auto"
        raise ConfigError("device", f"{name} is not there: torch sees {num_gpus} GPUs", fix)
    return name


def _read_texts(args: argparse.Namespace) -> list[list[int]]:
    """Return token sequences of equal length from the beginning of the calibration file. A rest at the end is
    dropped."""
    from quire.runtime.loading.resolve import resolve_model
    from quire.serving.text.tokenizer import load_tokenizer

    try:
        text = args.calibration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("calibration", f"{args.calibration} cannot be read: {error}", "give a text file") from None
    for flag, value in (
        ("calibration_tokens", args.calibration_tokens),
        ("calibration_window", args.calibration_window),
    ):
        if value < _FEWEST_TOKENS:
            raise ConfigError(flag, f"must be at least {_FEWEST_TOKENS}, is {value}", "give more")
    tokens = load_tokenizer(resolve_model(args.model)).encode(text[: 16 * args.calibration_tokens])
    tokens = tokens[: args.calibration_tokens]
    if len(tokens) < _FEWEST_TOKENS:
        raise ConfigError(
            "calibration", f"has {len(tokens)} tokens", f"give at least {_FEWEST_TOKENS}, better thousands"
        )
    window = min(args.calibration_window, len(tokens))
    return [list(tokens[begin : begin + window]) for begin in range(0, len(tokens) - window + 1, window)]


def _report(what: str, done: int, total: int) -> None:
    print(f"\r{what}: {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

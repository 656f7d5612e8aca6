"""Prints bytes in memory / bytes in the file, for every stored format on CPUs: python -m benchmarks.panel_memory
    [--outputs 256] [--inputs 4096] [--json PATH]

Random quantized weights are packed as the engine packs them: in the panels of integer gemms (`cpu_weights` integer,
integer8 and integer16; their bytes are the same on every instruction set), and for multiplication as floats
(`cpu_weights` float; the same in tiles and in panels). Kernels that expand weights are not listed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import facts, publish, save
from quire.config.level_bytes import packed_bytes
from quire.kernels.native.loader import choose_path
from quire.runtime.layers.native import IntegerGemm, NativeMultiply, PanelGemm
from quire.runtime.loading.gguf.levels import read_levels
from quire.runtime.loading.gguf.types import TYPE_BY_NAME
from quire.runtime.quantization.levels import GROUP, LevelWeight

GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
OTHERS = ("GPTQ 4 bits", "AWQ 4 bits", "int4 by rows", "int8 by rows", "int8 with zeros")
GROUP_SIZE = 128  # of GPTQ and AWQ checkpoints


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight, and its bytes in its file."""

    weight: LevelWeight
    num_bytes: float


def gguf_weight(name: str, outputs: int, inputs: int) -> Stored:
    """Return a weight of random bytes, in which the bytes of float16 values are finite."""
    kind = TYPE_BY_NAME[name]
    raw = torch.randint(0, 256, (outputs * inputs // kind.block_values, kind.block_bytes)).to(torch.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(name, (0, 2) if "1" in name else (0,))
    for place in (0, 2) if name in ("Q4_K", "Q5_K") else places:
        raw[:, place + 1] = raw[:, place + 1] % 8 | 0x18
    if name == "MXFP4":
        raw[:, 0] = raw[:, 0] % 8 + 116
    weight = read_levels(raw.view(-1), kind, (outputs, inputs))
    assert weight is not None, name
    return Stored(weight, raw.numel())


def other_weight(name: str, outputs: int, inputs: int) -> Stored:
    """Return a weight in the format of other checkpoints: quantized weights, float16 scales, and zero points with as
    many bits as weights."""
    bits = 4 if "4" in name.split(maxsplit=1)[0] or "4 bits" in name else 8
    group = inputs if "rows" in name else GROUP_SIZE
    levels = torch.randint(0, 1 << bits, (outputs, inputs))
    scales = torch.rand(outputs, inputs // group) * 0.01 + 0.001
    zeros = torch.randint(0, 1 << bits, scales.shape) if "rows" not in name else torch.full(scales.shape, 1 << bits - 1)
    stored, factors = levels.numel() * bits / 8, scales.numel() * 2
    if "rows" not in name:
        factors += scales.numel() * bits / 8
    if bits == 4:
        return Stored(LevelWeight(levels.to(torch.uint8), scales, -zeros * scales, nibbles=True), stored + factors)
    signed = (levels - 128).to(torch.int8)
    return Stored(LevelWeight(signed, scales, (128 - zeros) * scales, nibbles=False), stored + factors)


def stored_weight(name: str, outputs: int, inputs: int) -> Stored:
    return gguf_weight(name, outputs, inputs) if name in GGUF else other_weight(name, outputs, inputs)


def panel_ratio(stored: Stored) -> float:
    """Return the bytes in the panels of integer gemms divided by those of the file."""
    multiply = IntegerGemm(PanelGemm(torch.float32, keeps_weight=False)).pack_quantized(stored.weight, None)
    assert isinstance(multiply, NativeMultiply)
    return multiply.weight.data.nbytes / stored.num_bytes


def level_ratio(stored: Stored) -> float:
    """Return the same ratio for weights that are multiplied as floats."""
    weight = stored.weight
    return packed_bytes(weight.levels.numel(), nibbles=weight.nibbles and weight.group >= GROUP) / stored.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=256, help="a multiple of 16")
    parser.add_argument("--inputs", type=int, default=4096, help="a multiple of 256")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows, data, where = [], {}, facts()
    for name in (*GGUF, *OTHERS):
        stored = stored_weight(name, options.outputs, options.inputs)
        ratios = panel_ratio(stored), level_ratio(stored)
        data[name] = {"file": stored.num_bytes, "integer": ratios[0], "float": ratios[1]}
        bits = 8 * stored.num_bytes / (options.outputs * options.inputs)
        rows.append([name, f"{bits:.3f}", *(f"{each:.3f}" for each in ratios)])
    title = f"bytes in memory over bytes in the file, {options.outputs} x {options.inputs}, path {choose_path().name}"
    publish(title, ["format", "bits in the file", "integer gemms", "cpu_weights float"], rows, where)
    save(options.json, title, where, data)


if __name__ == "__main__":
    main()

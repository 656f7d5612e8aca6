"""Compiles the wgmma kernel for 4-bit weights for an H200 on any machine, and prints as JSON what could go wrong there:
registers that are written while an asynchronous product may still read them, spilled registers, products in turn.

A process of its own: the tests around it run kernels in Triton's interpreter, which is chosen when triton is imported.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from h200 import H200
from quire.kernels.triton import gemm_w4_hopper as module
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_w4 import pack_w4

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
NO_RESULT = ("ST", "BAR", "BRA", "WARPGROUP", "SYNCS.ARR", "RED", "UTMA")


def compile_one(rows: int, outputs: int, group: int, *, offsets: bool, gated: bool) -> Any:
    """The compiled kernel of a call."""
    found: list[Any] = []
    run = JITFunction.run

    def keep(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    levels, scales = torch.zeros(outputs, 1024, dtype=torch.uint8), torch.ones(outputs, 1024 // group).half()
    weight = pack_w4(levels, scales, scales if offsets else None)
    x, out = torch.zeros(rows, 1024).bfloat16(), torch.zeros(rows, outputs // (2 if gated else 1)).bfloat16()
    JITFunction.run = keep
    try:
        module.gemm_w4_hopper(
            x, weight, out, Workspace.make(x.device), residual=out, activation="silu" if gated else None, dependent=True
        )
    finally:
        JITFunction.run = run
    return found[0]


def disassemble(cubin: bytes) -> list[tuple[int, str]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [TOOLS / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(.*?);", text, re.MULTILINE)
    return [(int(place, 16), code.strip()) for place, code in found]


def written(code: str) -> set[int]:
    """Registers that an instruction writes."""
    name, _, operands = re.sub(r"^@!?U?P\d+ ", "", code).partition(" ")
    first = re.match(r"R(\d+)", operands.strip())
    if first is None or name.startswith(NO_RESULT):
        return set()
    width = 4 if ".M88.4" in name or ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    return set(range(int(first[1]), int(first[1]) + width))


def overwritten(body: list[tuple[int, str]]) -> list[str]:
    """Instructions of a loop that write a left operand of a product that was not waited for."""
    wrong: list[str] = []
    pending: list[set[int]] = []  # left operands of each group of products
    issued: set[int] = set()
    for turn in range(3):
        for _, code in body:
            if operand := PRODUCT.search(code):
                issued |= set(range(int(operand[1]), int(operand[1]) + 4))
                if "gsb0" in code:
                    pending, issued = [*pending, issued], set()
            elif wait := re.search(r"DEPBAR.LE gsb0, (0x[0-9a-f]+)", code):
                pending = pending[len(pending) - int(wait[1], 16) :] if int(wait[1], 16) else []
            elif turn and written(code) & issued.union(*pending):
                wrong.append(code)
    return wrong


def loops(code: list[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """The innermost loops that hold products."""
    places = {place: index for index, (place, _) in enumerate(code)}
    found: list[list[tuple[int, str]]] = []
    for index, (place, text) in enumerate(code):
        back = re.search(r"BRA (0x[0-9a-f]+)", text)
        if back is None or int(back[1], 16) >= place or int(back[1], 16) not in places:
            continue
        body = code[places[int(back[1], 16)] : index + 1]
        is_inner = not any(body[0] in other or other[0] in body for other in found)
        if is_inner and any(PRODUCT.search(each) for _, each in body):
            found.append(body)
    return found


def main() -> None:
    driver.set_active(H200())
    module.has_gluon = lambda device: True
    module.num_processors = lambda device: 132
    cases = {
        "16 rows": (9, 4096, 64, True, False), "128 rows, symmetric": (200, 4096, 128, False, False),
        "64 rows, gated": (64, 28672, 32, True, True),
    }  # fmt: skip
    report = {}
    for name in sys.argv[1:] or list(cases):
        rows, outputs, group, offsets, gated = cases[name]
        kernel = compile_one(rows, outputs, group, offsets=offsets, gated=gated)
        bodies = loops(disassemble(kernel.asm["cubin"]))
        report[name] = {
            "loops": len(bodies), "products": [sum("HGMMA" in text for _, text in body) for body in bodies],
            "overwritten": [text for body in bodies for text in overwritten(body)],
            "waits": [sum("DEPBAR" in text for _, text in body) for body in bodies],
            "shared": kernel.metadata.shared,
        }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""Times tiles of many rows by 4-bit weights, and experts by them: python -m benchmarks.gpu.nibble_tiles

Products of an 8B model's layer with factors folded into the numbers and not, beside the library in bfloat16; then the
experts of gpt-oss-20b in MXFP4 as stored, beside the same in bfloat16.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.kernel_timing import READ_CEILING, relative_error
from benchmarks.gpu.nibbles import CUDA, KINDS, LAYERS, make_weight, weight_bytes
from quire.kernels.clamp import Clamp
from quire.kernels.triton.gauge import graph_us
from quire.kernels.triton.grouped import Stack, choose_grouped_tilings, grouped_product, route
from quire.kernels.triton.grouped_nibbles import NibbleStack, choose_nibble_tilings, grouped_nibble_product
from quire.kernels.triton.nibble_products import nibble_product, pack_nibbles, unpack_nibbles
from quire.kernels.triton.products import Workspace

ROWS = (16, 32, 64, 128, 256)
EXPERTS, USED, SIZE = 32, 4, 2880


def dense(workspace: Workspace) -> None:
    for kind in KINDS:
        totals: dict[tuple[int, str], float] = {}
        for layer in LAYERS:
            weights = [make_weight(layer, kind, seed) for seed in range(3)]
            plain = [torch.randn(layer.weight_rows, layer.inputs, device=CUDA).bfloat16() for _ in range(2)]
            values = unpack_nibbles(weights[0])
            for rows in ROWS:
                x = torch.randn(rows, layer.inputs, device=CUDA).bfloat16()
                wanted = x.float() @ values.t()
                if layer.activation is not None:
                    gate, up = wanted.chunk(2, dim=1)
                    wanted = torch.nn.functional.silu(gate) * up
                for folded in (False, True):
                    name = "folded" if folded else "not folded"
                    call = partial(nibble_product, x, workspace=workspace, activation=layer.activation, folded=folded)
                    error = relative_error(call(weight=weights[0], dependent=True), wanted)
                    us = graph_us([partial(call, weight=each, dependent=True) for each in weights])
                    totals[rows, name] = totals.get((rows, name), 0.0) + us
                    if not error < 0.02:
                        print(f"WRONG {layer.name} M={rows} {name} {error:.1e}")
                us = graph_us([partial(torch.mm, x, each.t()) for each in plain])
                totals[rows, "library"] = totals.get((rows, "library"), 0.0) + us
        size = sum(weight_bytes(make_weight(layer, kind, 0)) for layer in LAYERS)
        print(f"a layer of {kind}: {size / READ_CEILING * 1e6:.1f} us at the ceiling")
        for rows in ROWS:
            ways = ", ".join(f"{way} {totals[rows, way]:.1f} us" for way in ("not folded", "folded", "library"))
            print(f"  M={rows}: {ways}", flush=True)


def experts() -> None:
    shapes, stacks, plain = ((2 * SIZE, SIZE), (SIZE, SIZE)), [], []
    for outputs, inputs in shapes:
        codes = torch.randint(0, 16, (EXPERTS, outputs, inputs), device=CUDA, dtype=torch.uint8)
        scales = torch.exp2(torch.randint(-9, -5, (EXPERTS, outputs, inputs // 32), device=CUDA).float()).bfloat16()
        bias = torch.randn(EXPERTS, outputs, device=CUDA).bfloat16()
        packed = [pack_nibbles(codes[each], scales[each], None) for each in range(EXPERTS)]
        stacks.append(NibbleStack.of(packed, bias, has_codes=True))
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device=CUDA)
        values = table[codes.int()] * scales.float().repeat_interleave(32, 2)
        plain.append(Stack(values.bfloat16(), None, bias))
    clamp = Clamp(7.0, 1.702, 1.0)
    for tokens in (1, 8, 64, 192, 1024):
        x = torch.randn(tokens, SIZE, device=CUDA).bfloat16() * 0.1
        first, second = choose_grouped_tilings(tokens * USED, EXPERTS, 2, CUDA)
        logits = torch.randn(tokens, EXPERTS, device=CUDA)
        routing = route(logits, USED, first, is_normalized=True)
        small, small_second = choose_nibble_tilings(tokens * USED, EXPERTS, 2, CUDA)
        stored = route(logits, USED, small, is_normalized=True)
        gated = {"num_used": USED, "activation": "silu", "clamp": clamp, "dependent": True}
        wanted = grouped_product(x, plain[0], routing, first, **gated)
        error = relative_error(grouped_nibble_product(x, stacks[0], stored, small, **gated), wanted.float())
        down = {"num_used": 1, "dependent": True}
        calls = {
            "as stored": (
                partial(grouped_nibble_product, x, stacks[0], stored, small, **gated),
                partial(grouped_nibble_product, wanted, stacks[1], stored, small_second, **down),
            ),
            "bfloat16": (
                partial(grouped_product, x, plain[0], routing, first, **gated),
                partial(grouped_product, wanted, plain[1], routing, second, **down),
            ),
        }
        read = len(routing.chosen.unique()) * 3 * SIZE * SIZE
        times = ", ".join(f"{name} {graph_us([a]):.1f} + {graph_us([b]):.1f} us" for name, (a, b) in calls.items())
        print(
            f"experts, {tokens} tokens: {times}; bytes as stored {read * 0.53125 / READ_CEILING * 1e6:.1f} us, bfloat16"
            f" {read * 2 / READ_CEILING * 1e6:.1f} us; err {error:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    experts()
    dense(Workspace.make(CUDA))

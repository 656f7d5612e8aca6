"""Times gemms of many rows with 4-bit weights, and experts with such weights: python -m benchmarks.gpu.nibble_tiles

Times the gemms of an 8B model's layer over cold weights: by the portable kernel with scales folded into the weights and
without, by the wgmma kernel on a Hopper GPU, and by the library in bfloat16. Also times the experts of gpt-oss-20b in
MXFP4 as stored by the portable kernel and by the one for Hopper GPUs, and in bfloat16.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_timing import READ_CEILING, relative_error
from benchmarks.gpu.nibbles import COLD_BYTES, CUDA, KINDS, LAYERS, make_weight, weight_bytes
from quire.kernels.clamp import Clamp
from quire.kernels.cuda.coded_experts import CodedStack, choose_coded_tile, coded_gemm, stack_codes, takes_codes
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_trials import Layer
from quire.kernels.triton.gemm_w4 import gemm_w4, pack_w4, unpack_w4
from quire.kernels.triton.gemm_w4_hopper import gemm_w4_hopper
from quire.kernels.triton.grouped import Stack, choose_grouped_tilings, grouped_gemm, route
from quire.kernels.triton.grouped_w4 import W4Stack, choose_w4_tilings, grouped_gemm_w4
from quire.kernels.triton.launch import has_gluon
from quire.kernels.triton.measurement import graph_us
from quire.kernels.triton.place_rows import PlacedRows, place_rows

ROWS = (16, 32, 64, 128, 256)
WAYS = ("not folded", "folded", "wgmma")
EXPERTS, USED, SIZE = 32, 4, 2880
TOKENS = (1, 8, 64, 192, 1024, 4096)


def dense(workspace: Workspace, rows_of: list[int], kinds: list[str], ways: list[str]) -> None:
    for kind in kinds:
        totals: dict[tuple[int, str], float] = {}
        for layer in LAYERS:
            first = make_weight(layer, kind, 0)
            weights = [first] + [
                make_weight(layer, kind, seed) for seed in range(1, -(-COLD_BYTES // first.data.nbytes))
            ]
            plain = [torch.randn(layer.weight_rows, layer.inputs, device=CUDA).bfloat16() for _ in weights[::2]]
            values = unpack_w4(first)
            for rows in rows_of:
                x = torch.randn(rows, layer.inputs, device=CUDA).bfloat16()
                wanted = x.float() @ values.t()
                if layer.activation is not None:
                    gate, up = wanted.chunk(2, dim=1)
                    wanted = torch.nn.functional.silu(gate) * up
                for name, call in _calls(x, layer, workspace, ways).items():
                    error = relative_error(call(weight=first), wanted)
                    us = graph_us([partial(call, weight=each) for each in weights])
                    totals[rows, name] = totals.get((rows, name), 0.0) + us
                    if not error < 0.02:
                        print(f"WRONG {layer.name} M={rows} {name} {error:.1e}")
                us = graph_us([partial(torch.mm, x, each.t()) for each in plain])
                totals[rows, "library"] = totals.get((rows, "library"), 0.0) + us
        size = sum(weight_bytes(make_weight(layer, kind, 0)) for layer in LAYERS)
        print(f"a layer of {kind}: {size / READ_CEILING * 1e6:.1f} us at the ceiling")
        for rows in rows_of:
            print(f"  M={rows}: " + ", ".join(f"{way} {us:.1f} us" for (at, way), us in totals.items() if at == rows))


def _calls(x: Tensor, layer: Layer, workspace: Workspace, wanted: list[str]) -> dict[str, partial[Tensor]]:
    """Return the wanted kernels for these rows: each takes a `weight`."""
    options = {"x": x, "workspace": workspace, "activation": layer.activation, "dependent": True}
    ways = {
        "not folded": partial(gemm_w4, **options, folded=False),
        "folded": partial(gemm_w4, **options, folded=True),
    }
    if has_gluon(x.device):
        out = torch.empty(len(x), layer.outputs, dtype=x.dtype, device=x.device)
        ways["wgmma"] = partial(gemm_w4_hopper, **options, out=out)
    return {name: call for name, call in ways.items() if name in wanted}


def experts() -> None:
    shapes, stacks, plain, coded = ((2 * SIZE, SIZE), (SIZE, SIZE)), [], [], []
    for outputs, inputs in shapes:
        codes = torch.randint(0, 16, (EXPERTS, outputs, inputs), device=CUDA, dtype=torch.uint8)
        scales = torch.exp2(torch.randint(-9, -5, (EXPERTS, outputs, inputs // 32), device=CUDA).float()).bfloat16()
        bias = torch.randn(EXPERTS, outputs, device=CUDA).bfloat16()
        packed = [pack_w4(codes[each], scales[each], None) for each in range(EXPERTS)]
        stacks.append(W4Stack.of(packed, bias, has_codes=True))
        if takes_codes(packed, torch.bfloat16, interleaved=not coded):
            coded.append(stack_codes(packed, bias, interleaved=not coded))
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device=CUDA)
        values = table[codes.int()] * scales.float().repeat_interleave(32, 2)
        plain.append(Stack(values.bfloat16(), None, bias))
    clamp = Clamp(7.0, 1.702, 1.0)
    for tokens in TOKENS:
        x = torch.randn(tokens, SIZE, device=CUDA).bfloat16() * 0.1
        first, second = choose_grouped_tilings(tokens * USED, EXPERTS, 2, CUDA)
        logits = torch.randn(tokens, EXPERTS, device=CUDA)
        routing = route(logits, USED, first, is_normalized=True)
        small, small_second = choose_w4_tilings(tokens * USED, EXPERTS, 2, CUDA)
        stored = route(logits, USED, small, is_normalized=True)
        gated = {"num_used": USED, "activation": "silu", "clamp": clamp, "dependent": True}
        wanted = grouped_gemm(x, plain[0], routing, first, **gated)
        error = relative_error(grouped_gemm_w4(x, stacks[0], stored, small, **gated), wanted.float())
        down = {"num_used": 1, "dependent": True}
        calls = {
            "as stored": (
                partial(grouped_gemm_w4, x, stacks[0], stored, small, **gated),
                partial(grouped_gemm_w4, wanted, stacks[1], stored, small_second, **down),
            ),
            "bfloat16": (
                partial(grouped_gemm, x, plain[0], routing, first, **gated),
                partial(grouped_gemm, wanted, plain[1], routing, second, **down),
            ),
        }
        if coded:
            _time_coded(x, logits, coded, plain, wanted, clamp)
        read = len(routing.chosen.unique()) * 3 * SIZE * SIZE
        times = ", ".join(f"{name} {graph_us([a]):.1f} + {graph_us([b]):.1f} us" for name, (a, b) in calls.items())
        print(
            f"experts, {tokens} tokens: {times}; bytes as stored {read * 0.53125 / READ_CEILING * 1e6:.1f} us, bfloat16"
            f" {read * 2 / READ_CEILING * 1e6:.1f} us; err {error:.1e}",
            flush=True,
        )


def _time_coded(
    x: Tensor, logits: Tensor, coded: list[CodedStack], plain: list[Stack], inner: Tensor, clamp: Clamp
) -> None:
    """Time the kernel for Hopper GPUs, with the copies of rows to their tiles. inner: the right results of gate-up."""
    pairs = len(x) * USED
    tile = choose_coded_tile(pairs, EXPERTS)
    assert tile is not None
    tiling = choose_grouped_tilings(pairs, EXPERTS, 2, CUDA)[0]._replace(block_m=tile)
    routing = route(logits, USED, tiling, is_normalized=True)

    def layer() -> Tensor:
        placed = place_rows(x, routing, tile, num_used=USED, dependent=True)
        made = coded_gemm(placed, coded[0], routing, activation="silu", clamp=clamp, dependent=True)
        assert isinstance(made, PlacedRows)
        out = coded_gemm(made, coded[1], routing, early=True, dependent=True)
        assert isinstance(out, Tensor)
        return out

    wanted = grouped_gemm(inner, plain[1], routing, tiling, num_used=1)
    print(f"  for Hopper GPUs: {graph_us([layer]):.1f} us, err {relative_error(layer(), wanted.float()):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("dense", "experts"), help="what is measured; by default both")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="kernels beside the library")
    options = parser.parse_args()
    if options.part != "dense":
        experts()
    if options.part != "experts":
        dense(Workspace.make(CUDA), options.rows, options.kinds, options.ways)


if __name__ == "__main__":
    main()

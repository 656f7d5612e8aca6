"""Every kernel of a decoder's step at the sizes of one model, as benchmark cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.activation import gate
from quire.kernels.triton.attention_config import prefill_config
from quire.kernels.triton.attention_decode import paged_decode
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles, paged_prefill
from quire.kernels.triton.attention_schedule import allocate_split_plan, fill_split_plan
from quire.kernels.triton.copy import copy_blocks
from quire.kernels.triton.embedding import embed
from quire.kernels.triton.gemm_skinny import Workspace
from quire.kernels.triton.gemm_trials import BYTES, Kind, Layer, Operands
from quire.kernels.triton.logprobs import Logprobs, LogprobSpace, logprobs
from quire.kernels.triton.measurement import Case, num_copies
from quire.kernels.triton.norm import add_rms_norm
from quire.kernels.triton.quantize import quantize_rows
from quire.kernels.triton.rotary import LayerMemory, rotate_and_store
from quire.kernels.triton.sampling import SampleSpace, sample
from quire.kernels.triton.sampling_weights import RowParameters

EPS = 1e-5
TOP_K, LISTED = 50, 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model and of a step. The defaults are those of an 8B model."""

    hidden: int = 4096
    intermediate: int = 14336
    queries: int = 32
    keys: int = 8
    dim: int = 128
    vocab: int = 128256
    block: int = 16
    tokens: int = 8192  # of a large prefill step
    rows: int = 64  # of a decode step
    context: int = 2048  # tokens per decode row
    prompt: int = 2048  # tokens of a prompt
    dtype: torch.dtype = torch.bfloat16

    def layers(self) -> list[Layer]:
        """Return the linear layers of one decoder layer, and the LM head."""
        query_size, kv_size = self.queries * self.dim, self.keys * self.dim
        return [
            Layer("qkv", query_size + 2 * kv_size, self.hidden, norm=True),
            Layer("output", self.hidden, query_size, residual=True),
            Layer("gate, up", self.intermediate, self.hidden, "silu", norm=True),
            Layer("down", self.hidden, self.intermediate, residual=True),
            Layer("head", self.vocab, self.hidden),
        ]


Maker = Callable[[], Case]


def cases(sizes: Sizes, device: torch.device, *, float8: bool) -> Iterator[Maker]:
    """Yield makers of cases; each allocates its memory only when called. `float8`: the device supports float8 gemm."""
    for make in (_norm, _gate, _rotary, _embed, _copy_blocks, _decode, _prefill, _sample, _sample_top_k, _logprobs):
        yield partial(make, sizes, device)
    if float8:
        yield partial(_quantize, sizes, device)
    workspace = Workspace.make(device)
    wide: list[tuple[int, Kind]] = [(1, "bf16"), (16, "bf16"), (64, "bf16")]
    small: list[tuple[int, Kind]] = [(1, "w8"), (64, "w8a8")]
    for layer in sizes.layers():
        for rows, kind in wide + (small if float8 and layer.name != "head" else []):
            yield partial(_gemm, layer, rows, kind, workspace, device)


def _numbers(sizes: Sizes, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(sizes.dtype)


def _sets(sizes: Sizes, device: torch.device, *shape: int) -> list[Tensor]:
    """Return tensors of one shape, enough of them that none stays in the L2 cache."""
    size = torch.Size(shape).numel() * sizes.dtype.itemsize
    return [_numbers(sizes, device, *shape) for _ in range(num_copies(size))]


def _norm(sizes: Sizes, device: torch.device) -> Case:
    shape = (sizes.tokens, sizes.hidden)
    weight, residual = _numbers(sizes, device, sizes.hidden), _numbers(sizes, device, *shape)
    out = torch.empty(shape, dtype=sizes.dtype, device=device)
    calls = [partial(add_rms_norm, x, residual, weight, EPS, out) for x in _sets(sizes, device, *shape)]
    return Case(f"add, norm {shape[0]} x {shape[1]}", calls, 4 * out.nbytes)


def _gate(sizes: Sizes, device: torch.device) -> Case:
    out = torch.empty(sizes.tokens, sizes.intermediate, dtype=sizes.dtype, device=device)
    calls = [partial(gate, x, "silu", out) for x in _sets(sizes, device, sizes.tokens, 2 * sizes.intermediate)]
    return Case(f"gate {sizes.tokens} x {sizes.intermediate}", calls, 3 * out.nbytes)


def _rotary(sizes: Sizes, device: torch.device) -> Case:
    width = (sizes.queries + 2 * sizes.keys) * sizes.dim
    num_blocks = -(-sizes.tokens // sizes.block)
    shape = (num_blocks, sizes.keys, sizes.block, sizes.dim)
    memory = LayerMemory(_numbers(sizes, device, *shape), _numbers(sizes, device, *shape))
    angles = torch.rand(sizes.tokens, sizes.dim, device=device)
    positions = torch.arange(sizes.tokens, device=device)
    rows = torch.zeros(sizes.tokens, dtype=torch.int32, device=device)
    blocks = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    calls = [
        partial(rotate_and_store, x, angles, positions, rows, blocks, memory)
        for x in _sets(sizes, device, sizes.tokens, width)
    ]
    moved = sizes.tokens * sizes.dim * sizes.dtype.itemsize * (2 * sizes.queries + 4 * sizes.keys)
    return Case(f"rotate, cache {sizes.tokens} tokens", calls, moved)


def _embed(sizes: Sizes, device: torch.device) -> Case:
    table = _numbers(sizes, device, sizes.vocab, sizes.hidden)
    out = torch.empty(sizes.tokens, sizes.hidden, dtype=sizes.dtype, device=device)
    ids = [torch.randint(0, sizes.vocab, (sizes.tokens,), device=device) for _ in range(4)]
    return Case(f"embed {sizes.tokens} tokens", [partial(embed, line, table, out) for line in ids], 2 * out.nbytes)


def _quantize(sizes: Sizes, device: torch.device) -> Case:
    shape = (sizes.tokens, sizes.intermediate)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(sizes.tokens, dtype=torch.float32, device=device)
    calls = [partial(quantize_rows, x, out, scale) for x in _sets(sizes, device, *shape)]
    return Case(f"quantize {shape[0]} x {shape[1]}", calls, out.numel() * (sizes.dtype.itemsize + 1))


def _copy_blocks(sizes: Sizes, device: torch.device) -> Case:
    """Copy blocks in all planes of a cache of 32 layers."""
    memory = _numbers(sizes, device, 64, 2 * sizes.rows, sizes.keys * sizes.block * sizes.dim)
    pairs = torch.randperm(2 * sizes.rows, device=device).view(sizes.rows, 2).contiguous()
    return Case(f"copy {sizes.rows} blocks, 32 layers", [partial(copy_blocks, memory, pairs)], memory.nbytes)


def _caches(sizes: Sizes, device: torch.device, tokens: int, rows: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return keys and values of several layers, and block tables with scattered blocks."""
    each = -(-tokens // sizes.block)
    shape = (each * rows, sizes.keys, sizes.block, sizes.dim)
    size = 2 * torch.Size(shape).numel() * sizes.dtype.itemsize
    layers = [(_numbers(sizes, device, *shape), _numbers(sizes, device, *shape)) for _ in range(num_copies(size, 8))]
    return layers, torch.randperm(each * rows, device=device).to(torch.int32).view(rows, each)


def _decode(sizes: Sizes, device: torch.device) -> Case:
    layers, tables = _caches(sizes, device, sizes.context, sizes.rows)
    query = _numbers(sizes, device, sizes.rows, sizes.queries, sizes.dim)
    plan, out = allocate_split_plan(layers[0][0], sizes.queries, sizes.rows), torch.empty_like(query)
    fill_split_plan(plan, torch.full((sizes.rows,), sizes.context, dtype=torch.int32, device=device))
    rule = AttentionRule(sizes.dim**-0.5)
    calls = [partial(paged_decode, query, key, value, tables, plan, rule, out=out) for key, value in layers]
    moved = 2 * sizes.rows * sizes.context * sizes.keys * sizes.dim * sizes.dtype.itemsize
    return Case(f"attention, decode {sizes.rows} x {sizes.context}", calls, moved)


def _prefill(sizes: Sizes, device: torch.device) -> Case:
    layers, tables = _caches(sizes, device, sizes.prompt, 1)
    query = _numbers(sizes, device, sizes.prompt, sizes.queries, sizes.dim)
    config, out = prefill_config(sizes.dim, sizes.dtype, device), torch.empty_like(query)
    tiles = lay_out_tiles([(0, 0, sizes.prompt, 0)], sizes.queries // sizes.keys, config.block_m)
    plan, rule = PrefillPlan(config, tiles.to(device)), AttentionRule(sizes.dim**-0.5)
    calls = [partial(paged_prefill, query, key, value, tables, plan, rule, out=out) for key, value in layers]
    pairs = sizes.prompt * (sizes.prompt + 1) // 2
    return Case(f"attention, prompt of {sizes.prompt}", calls, 2 * query.nbytes, 4 * pairs * sizes.queries * sizes.dim)


def _sample(sizes: Sizes, device: torch.device, top_k: int = 0) -> Case:
    parameters = RowParameters.make(sizes.rows, device)
    parameters.temperature.fill_(0.8)
    parameters.top_k.fill_(top_k)
    lengths = torch.full((sizes.rows,), 4, device=device)
    space = SampleSpace.make(sizes.rows, sizes.vocab, device, filtered=top_k > 0)
    rows, out = torch.arange(sizes.rows, dtype=torch.int32, device=device), torch.empty_like(lengths)
    logits = _sets(sizes, device, sizes.rows, sizes.vocab)
    calls = [partial(sample, line, rows, lengths, parameters, lengths // 2, space, out) for line in logits]
    kind = f", top {top_k}" if top_k else ""
    return Case(f"sample {sizes.rows} x {sizes.vocab}{kind}", calls, logits[0].nbytes)


def _sample_top_k(sizes: Sizes, device: torch.device) -> Case:
    return _sample(sizes, device, TOP_K)


def _logprobs(sizes: Sizes, device: torch.device) -> Case:
    logits = _sets(sizes, device, sizes.rows, sizes.vocab)
    ids = torch.zeros(sizes.rows, dtype=torch.int64, device=device)
    space = LogprobSpace.make(sizes.rows, sizes.vocab, device)
    out = Logprobs.make(sizes.rows, LISTED, device)
    calls = [partial(logprobs, line, ids, space, out) for line in logits]
    return Case(f"logprobs {sizes.rows} x {sizes.vocab}", calls, logits[0].nbytes)


def _gemm(layer: Layer, rows: int, kind: Kind, workspace: Workspace, device: torch.device) -> Case:
    operands = Operands.make(layer, rows, kind, device)
    size = layer.weight_rows * layer.inputs * BYTES[kind][1]
    return Case(f"gemm, {layer.name}, {rows} rows, {kind}", operands.calls(layer, workspace), size)

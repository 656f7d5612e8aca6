"""The kernels around the gemms: cases to time, each compared with plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_timing import Case, relative_error
from quire.kernels.reference import activation as reference_activation
from quire.kernels.reference import norm as reference_norm
from quire.kernels.reference import quantize
from quire.kernels.reference import rotary as reference_rotary
from quire.kernels.reference import sampling as reference_sampling
from quire.kernels.triton.activation import gate
from quire.kernels.triton.copy import copy_blocks, gather_blocks, scatter_blocks
from quire.kernels.triton.embedding import embed, embed_newest
from quire.kernels.triton.logprobs import Logprobs, LogprobSpace, logprobs
from quire.kernels.triton.measurement import num_copies
from quire.kernels.triton.norm import add_rms_norm
from quire.kernels.triton.penalties import RowPenalties, penalize
from quire.kernels.triton.quantize import quantize_rows
from quire.kernels.triton.rotary import HeadNorms, LayerMemory, rotate_and_store
from quire.kernels.triton.sampling import SampleSpace, append_tokens, sample
from quire.kernels.triton.sampling_weights import RowParameters, RowTokens

CUDA = torch.device("cuda")
BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
SAMPLED = {
    "greedy": reference_sampling.Parameters(),
    "T=0.6": reference_sampling.Parameters(temperature=0.6),
    "min_p": reference_sampling.Parameters(temperature=1.0, min_p=0.05),
    "top_k=50": reference_sampling.Parameters(temperature=1.0, top_k=50),
    "top_p=0.9": reference_sampling.Parameters(temperature=0.8, top_p=0.9),
    "top_p=0.95 flat": reference_sampling.Parameters(temperature=8.0, top_p=0.95),
}


def cases() -> Iterator[Callable[[], Case]]:
    """Yield functions that make cases: each allocates its memory only when called."""
    for rows in (1, 64, 2048):
        yield partial(_norm, rows, 4096, False)
        yield partial(_gate, rows, 14336, False)
        yield partial(_rotary, rows, 32, 8, False, BF16)
    yield partial(_norm, 64, 1024, False)
    yield partial(_norm, 64, 4096, True)
    yield partial(_gate, 64, 14336, True)
    yield partial(_rotary, 64, 16, 8, True, BF16)
    yield partial(_rotary, 64, 32, 8, False, FLOAT8)
    yield partial(_quantize, 2048, 4096)
    yield partial(_quantize, 4096, 14336)
    yield _embed
    yield partial(_blocks, "copy")
    yield partial(_blocks, "gather")
    yield partial(_blocks, "gather to host")
    yield partial(_blocks, "scatter from host")
    for rows in (1, 64, 256):
        for name in SAMPLED:
            if rows == 64 or name in ("greedy", "T=0.6"):
                yield partial(_sample, rows, 128256, name, False)
    for name in ("greedy", "T=0.6", "top_k=50", "top_p=0.9"):
        yield partial(_sample, 64, 128256, name, True)
    yield partial(_penalize, 64, 128256)
    yield partial(_logprobs, 64, 128256, 20)


def _rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).to(BF16)


def _float8(rows: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, size, dtype=FLOAT8, device=CUDA), torch.empty(rows, device=CUDA)


def _norm(rows: int, size: int, quantized: bool) -> Case:
    weight = _rand(size)
    sets = [(_rand(rows, size), _rand(rows, size)) for _ in range(num_copies(rows * size * 6))]
    out, scale = _float8(rows, size) if quantized else (torch.empty(rows, size, dtype=BF16, device=CUDA), None)

    def error() -> float:
        x, residual = sets[0][0].clone(), sets[0][1].clone()
        found_sum = residual.clone()
        add_rms_norm(x, found_sum, weight, 1e-5, out, scale)
        wanted = reference_norm.add_rms_norm(x, residual, weight, 1e-5)
        found = out if scale is None else out.float() * scale[:, None]
        return max(relative_error(found, wanted), relative_error(found_sum, residual))

    calls = [partial(add_rms_norm, x, residual, weight, 1e-5, out, scale) for x, residual in sets]
    kind = "float8" if quantized else "bf16"
    return Case(f"add_rms_norm {rows}x{size} {kind}", calls, error, rows * size * (7 if quantized else 8))


def _gate(rows: int, size: int, quantized: bool) -> Case:
    sets = [_rand(rows, 2 * size) for _ in range(num_copies(rows * size * 4))]
    out, scale = _float8(rows, size) if quantized else (torch.empty(rows, size, dtype=BF16, device=CUDA), None)

    def error() -> float:
        gate(sets[0], "silu", out, scale)
        found = out if scale is None else out.float() * scale[:, None]
        return relative_error(found, reference_activation.gate(sets[0].float(), "silu"))

    calls = [partial(gate, x, "silu", out, scale) for x in sets]
    kind = "float8" if quantized else "bf16"
    return Case(f"gate {rows}x{size} {kind}", calls, error, rows * size * (5 if quantized else 6))


def _rotary(tokens: int, queries: int, keys: int, normed: bool, held: torch.dtype) -> Case:
    dim, size, width = 128, 16, (queries + 2 * keys) * 128
    table = torch.rand(4096, dim, device=CUDA) * 2 - 1
    num_rows = min(tokens, 64)
    blocks = torch.randperm(num_rows * 8, device=CUDA).to(torch.int32).view(num_rows, 8)
    rows = (torch.arange(tokens, device=CUDA) % num_rows).to(torch.int32)
    positions = (torch.arange(tokens, device=CUDA) // num_rows).to(torch.int32)
    memory = [torch.zeros(num_rows * 8, keys, size, dim, device=CUDA).to(held) for _ in range(2)]
    norms = HeadNorms(_rand(dim), _rand(dim), 1e-6) if normed else None
    sets = [_rand(tokens, width) for _ in range(num_copies(tokens * width * 2))]
    query = torch.empty(tokens, queries * dim, dtype=BF16, device=CUDA)

    def error() -> float:
        wanted = [side.cpu() for side in memory]
        few = min(tokens, 128)
        step = (table.cpu(), positions[:few].cpu(), rows[:few].cpu(), blocks.cpu(), wanted)
        rotated, _ = reference_rotary.rotate_and_store(
            sets[0][:few].view(few, -1, dim).cpu(), *step, norms=norms and tuple(_cpu(part) for part in norms)
        )
        live = LayerMemory(*memory)
        rotate_and_store(sets[0][:few], table, positions[:few], rows[:few], blocks, live, norms, query[:few])
        found = [side.cpu().float() for side in memory]
        sides = [relative_error(side, want.float()) for side, want in zip(found, wanted, strict=True)]
        return max(relative_error(query[:few].cpu(), rotated.flatten(1)), *sides)

    calls = [
        partial(rotate_and_store, x, table, positions, rows, blocks, LayerMemory(*memory), norms, query) for x in sets
    ]
    num_bytes = tokens * (width * 2 + queries * dim * 2 + 2 * keys * dim * held.itemsize)
    kind = f"{'norm ' if normed else ''}{str(held).removeprefix('torch.')}"
    return Case(f"rotary {tokens} tokens {queries}/{keys} {kind}", calls, error, num_bytes)


def _cpu(part: Tensor | float) -> Tensor | float:
    return part.cpu() if isinstance(part, Tensor) else part


def _quantize(rows: int, size: int) -> Case:
    sets = [_rand(rows, size) for _ in range(num_copies(rows * size * 2))]
    out, scale = _float8(rows, size)

    def error() -> float:
        quantize_rows(sets[0], out, scale)
        wanted, wanted_scale = quantize.quantize_rows(sets[0])
        return max(relative_error(out.float(), wanted.float()), relative_error(scale, wanted_scale))

    return Case(
        f"quantize {rows}x{size}", [partial(quantize_rows, x, out, scale) for x in sets], error, rows * size * 3
    )


def _embed() -> Case:
    table, tokens = _rand(128256, 4096), torch.randint(0, 128256, (64, 4096), dtype=torch.int32, device=CUDA)
    lengths = torch.randint(1, 4096, (64,), device=CUDA)
    rows = torch.arange(64, dtype=torch.int32, device=CUDA)
    out, positions = torch.empty(64, 4096, dtype=BF16, device=CUDA), torch.empty(64, dtype=torch.int32, device=CUDA)

    def error() -> float:
        embed_newest(rows, tokens, lengths, table, out, positions)
        ids = tokens.gather(1, (lengths - 1)[:, None]).squeeze(1)
        return max(relative_error(out, table[ids]), relative_error(embed(ids, table), table[ids]))

    call = partial(embed_newest, rows, tokens, lengths, table, out, positions)
    return Case("embed_newest 64x4096", [call], error, 64 * 4096 * 4)


def _blocks(kind: str) -> Case:
    memory = _rand(64, 512, 8, 16, 128)  # [planes, blocks, kv heads, block, dim]: 2 MiB a block
    count, block_bytes = 32, 64 * 8 * 16 * 128 * 2
    ids = torch.randperm(512, device=CUDA)
    pairs = ids[: 2 * count].view(count, 2).contiguous()
    staging = torch.zeros(count, 64, 8, 16, 128, dtype=BF16, device="cpu" if "host" in kind else CUDA)
    staging = staging.pin_memory() if "host" in kind else staging
    call = {
        "copy": partial(copy_blocks, memory, pairs),
        "gather": partial(gather_blocks, memory, ids[:count], staging),
        "gather to host": partial(gather_blocks, memory, ids[:count], staging),
        "scatter from host": partial(scatter_blocks, staging, ids[:count], memory),
    }[kind]

    def error() -> float:
        call()
        torch.cuda.synchronize()
        if kind == "copy":
            return relative_error(memory[:, pairs[:, 1]], memory[:, pairs[:, 0]])
        return relative_error(memory[:, ids[:count]].transpose(0, 1).cpu(), staging.cpu())

    return Case(f"blocks {kind}, {count} of 2 MiB", [call], error, count * block_bytes * 2)


def _history(num_rows: int, vocab_size: int) -> RowTokens:
    tokens = torch.randint(0, vocab_size, (num_rows, 2048), dtype=torch.int32, device=CUDA)
    lengths = torch.randint(1000, 2000, (num_rows,), device=CUDA)
    return RowTokens(tokens, lengths, lengths // 2)


def _sample(entries: int, vocab_size: int, name: str, dependent: bool) -> Case:
    """Return a case whose error is the share of rows whose token differs from the reference's."""
    how = SAMPLED[name]
    logits = [_rand(entries, vocab_size, scale=3.0) for _ in range(num_copies(entries * vocab_size * 2, 4))]
    parameters, history = RowParameters.make(entries, CUDA), _history(entries, vocab_size)
    parameters.temperature.fill_(how.temperature)
    parameters.top_k.fill_(how.top_k)
    parameters.top_p.fill_(how.top_p)
    parameters.log_min_p.fill_(math.log(how.min_p) if how.min_p else -math.inf)
    parameters.stream.copy_(torch.randint(-(2**62), 2**62, (entries,), device=CUDA))
    rows = torch.arange(entries, dtype=torch.int32, device=CUDA)
    filtered = how.top_k > 0 or how.top_p < 1.0
    space = SampleSpace.make(entries, vocab_size, CUDA, filtered=filtered)
    out = torch.empty(entries, dtype=torch.int64, device=CUDA)

    def error() -> float:
        sample(logits[0], rows, history.lengths, parameters, history.num_prompt, space, out)
        streams, num_outputs = parameters.stream.tolist(), (history.lengths - history.num_prompt).tolist()
        few = min(entries, 64)
        wanted = [
            reference_sampling.sample(logits[0][row], how._replace(stream=streams[row]), num_outputs[row])
            for row in range(few)
        ]
        return sum(found != want for found, want in zip(out[:few].tolist(), wanted, strict=True)) / few

    grown = RowTokens(history.tokens, history.lengths.clone(), history.num_prompt)

    def run(line: Tensor) -> None:
        sample(line, rows, history.lengths, parameters, history.num_prompt, space, out, dependent=dependent)
        append_tokens(rows, out, grown, dependent=dependent)

    title = f"sample {entries}x{vocab_size} {name}{' dependent' if dependent else ''}"
    return Case(title, [partial(run, x) for x in logits], error, entries * vocab_size * 2)


def _penalize(entries: int, vocab_size: int) -> Case:
    logits, history = _rand(entries, vocab_size), _history(entries, vocab_size)
    penalties, rows = RowPenalties.make(entries, CUDA), torch.arange(entries, device=CUDA)
    for column, value in zip(penalties, (1.2, 0.5, 0.3), strict=True):
        column.fill_(value)
    out = torch.empty(entries, vocab_size, device=CUDA)

    def error() -> float:
        penalize(logits, rows, penalties, history, out)
        length, prompt = int(history.lengths[0]), int(history.num_prompt[0])
        wanted = reference_sampling.penalize(
            logits[0].cpu(), history.tokens[0, :length].tolist(), prompt, (1.2, 0.5, 0.3)
        )
        return relative_error(out[0].cpu(), wanted)

    call = partial(penalize, logits, rows, penalties, history, out)
    return Case(f"penalize {entries}x{vocab_size}, 1.5k tokens", [call], error, entries * vocab_size * 6)


def _logprobs(entries: int, vocab_size: int, listed: int) -> Case:
    logits, ids = _rand(entries, vocab_size), torch.randint(0, vocab_size, (entries,), device=CUDA)
    space, out = LogprobSpace.make(entries, vocab_size, CUDA), Logprobs.make(entries, listed, CUDA)

    def error() -> float:
        logprobs(logits, ids, space, out)
        chosen, ranks, top_ids, top = reference_sampling.logprobs(logits, ids, listed)
        wrong = float((out.rank != ranks).float().mean() + (out.top_ids != top_ids).float().mean())
        return max(relative_error(out.chosen, chosen), relative_error(out.top_logprobs, top), wrong)

    call = partial(logprobs, logits, ids, space, out)
    return Case(f"logprobs {entries}x{vocab_size} top {listed}", [call], error, entries * vocab_size * 2)

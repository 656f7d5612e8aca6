"""FlashInfer's kernels over the paged cache, if it is installed: one wrapper for decodes, one for prompt chunks.

A wrapper is planned once per step from counts on the host, then run once per layer. Its plan is in memory that the
wrapper owns, so steps cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, Counts, Kernels, LayerCache
from quire.runtime.layers.weights import Placement
from quire.runtime.transfer import to_device
from quire.types.errors import ConfigError

NOT_INSTALLED = "the package flashinfer-python is not installed"
WORKSPACE_BYTES = 128 << 20  # partial results of rows whose keys are split; what FlashInfer recommends
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
LEAST_CAPABILITY = (7, 5)
TENSOR_CORE_GROUP = 4  # query heads per KV head from which decodes use tensor cores
_LAYOUT = "HND"  # FlashInfer's name for [blocks, kv heads, block, dim]


def why_not_flashinfer(placement: Placement, heads: Heads, kv_dtype: torch.dtype | None) -> str | None:
    """Return why its kernels cannot run, or None if they can. Any block size is supported. Does not import the
    package."""
    if find_spec("flashinfer") is None:
        return NOT_INSTALLED
    if placement.device.type != "cuda":
        return "its kernels run on CUDA devices"
    found = torch.cuda.get_device_capability(placement.device)
    if found < LEAST_CAPABILITY:
        return f"compute capability {found[0]}.{found[1]} is too old for its kernels"
    if heads.latent is not None:
        return "its kernels are not used for attention over latents"
    if heads.dim not in HEAD_DIMS:
        return f"a head size of {heads.dim} is not supported (64, 128 and 256 are)"
    if placement.dtype not in DTYPES:
        return "its kernels support float16 and bfloat16 only"
    if kv_dtype is not None and kv_dtype != placement.dtype:
        return "it needs a KV cache of the model's dtype"
    return None


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """The work that the wrappers were planned for. Valid until the next step is prepared."""

    num_decodes: int
    has_chunks: bool


class FlashInferAttention:
    """Implements BatchBackend for CUDA, float16 or bfloat16. The constructor compiles the kernels unless they are in
    FlashInfer's cache, and raises ConfigError if they cannot be compiled."""

    kernels: Kernels = "torch"

    def __init__(self, heads: Heads, placement: Placement, block_size: int) -> None:
        self._heads, self._placement = heads, placement
        dtype = placement.dtype
        self._common: dict[str, Any] = {
            "pos_encoding_mode": "NONE",
            "sm_scale": heads.dim**-0.5,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._rule: AttentionRule | None = None  # the same for all layers
        self._loaded = Fence(placement.device)
        self._plan: FlashInferPlan | None = None
        flashinfer = _package()
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=placement.device)
        self._decode: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, _LAYOUT, use_tensor_cores=heads.num_query // heads.num_kv >= TENSOR_CORE_GROUP
        )
        self._prefill: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT)
        self._compile(block_size)

    def accept(self, rule: AttentionRule) -> None:
        """Accept rules with one scale for all layers, with which the wrappers are planned, and nothing else."""
        if not rule.is_plain:
            raise _cannot_run("the model has sliding windows, capped scores, attention sinks or ALiBi", 'use "auto"')
        if self._rule is not None and rule.scale != self._rule.scale:
            raise _cannot_run("layers of the model scale their scores differently", 'use "auto"')
        self._rule, self._common["sm_scale"] = rule, rule.scale

    def prepare(self, batch: AttentionBatch) -> FlashInferPlan:
        """Plan a step. Waits until the device has read the plan of the previous step, which it has when that step
        begins."""
        self._loaded.wait()
        if len(batch.lengths):
            self._plan_decodes(batch.lengths, batch.block_ids, batch.block_size)
        if batch.chunks:
            self._plan_chunks(batch.chunks, batch.block_size)
        self._loaded.set()
        self._plan = FlashInferPlan(len(batch.lengths), bool(batch.chunks))
        return self._plan

    def attend(
        self,
        query: Tensor,
        key: Tensor,  # noqa: ARG002  read from the cache instead
        value: Tensor,  # noqa: ARG002
        cache: LayerCache,
        plan: FlashInferPlan,
        rule: AttentionRule,
    ) -> Tensor:
        assert rule.is_plain
        assert rule.scale == self._common["sm_scale"], "not the scale that was accepted"
        assert plan is self._plan, "another step was prepared since"
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)  # [tokens, query heads, dim]
        memory, count = (cache.key, cache.value), plan.num_decodes
        if count:
            self._decode.run(query[:count], memory, out=out[:count])
        if plan.has_chunks:
            self._prefill.run(query[count:], memory, out=out[count:])
        return out.flatten(1)

    def _plan_decodes(self, lengths: Counts, block_ids: Tensor, block_size: int) -> None:
        begins, last = _pages(lengths, block_size)
        held = np.diff(begins)  # blocks
        firsts = np.arange(len(lengths)) * block_ids.shape[1]
        where = np.repeat(firsts - begins[:-1], held) + np.arange(begins[-1])
        blocks = block_ids.reshape(-1).index_select(0, to_device(torch.from_numpy(where), block_ids.device))
        self._decode.plan(_ints(begins), blocks.int(), _ints(last), *self._shape(block_size), **self._common)

    def _plan_chunks(self, chunks: Sequence[ChunkSpan], block_size: int) -> None:
        counts = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        begins, last = _pages(np.array([chunk.length for chunk in chunks], dtype=np.int64), block_size)
        held = np.diff(begins).tolist()
        blocks = torch.cat([chunk.block_ids[:count] for chunk, count in zip(chunks, held, strict=True)])
        self._prefill.plan(
            _ints(_begins(counts)), _ints(begins), blocks.int(), _ints(last),
            *self._shape(block_size), causal=True, **self._common,
        )  # fmt: skip

    def _shape(self, block_size: int) -> tuple[int, int, int, int]:
        return self._heads.num_query, self._heads.num_kv, self._heads.dim, block_size

    def _compile(self, block_size: int) -> None:
        """Plan one token of each kind, which makes FlashInfer build and load its kernels."""
        first = torch.zeros((1, 1), dtype=torch.int64, device=self._placement.device)
        try:
            self._plan_decodes(np.ones(1, dtype=np.int64), first, block_size)
            self._plan_chunks((ChunkSpan(0, 0, 1, first[0]),), block_size)
        except (OSError, RuntimeError) as error:
            reason = f"its kernels were not compiled: {_first_line(error)}"
            raise _cannot_run(reason, 'put nvcc and ninja on PATH, or use "auto"') from error
        self._loaded.set()


class Fence:
    """A point in the device's queue that the host can wait for. Does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def _package() -> Any:
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise _cannot_run(f"it cannot be imported: {_first_line(error)}", 'install it anew, or use "auto"') from error


def _cannot_run(reason: str, fix: str) -> ConfigError:
    return ConfigError("attention_backend", f"'flashinfer' cannot run here: {reason}", fix)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _pages(lengths: Counts, block_size: int) -> tuple[Counts, Counts]:
    """Return the index of each sequence's first block among all blocks (with the end appended), and the tokens in its
    last block."""
    return _begins(-(-lengths // block_size)), (lengths - 1) % block_size + 1


def _begins(counts: Counts) -> Counts:
    return np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum()))


def _ints(numbers: npt.NDArray[np.int64]) -> Tensor:
    """Return int32 counts on the host. FlashInfer reads them there without waiting for the device, and copies them
    itself."""
    return torch.from_numpy(numbers.astype(np.int32))

"""Chooses and makes attention backends by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.config.arguments import VIRTUAL_BACKEND, check_backend
from quire.config.model import Heads
from quire.kernels.native.loader import why_not_native
from quire.kernels.reference.cache_quantize import SCALED
from quire.runtime.accelerator import dependent_rows, why_not_triton
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.attention.flashinfer import NOT_INSTALLED, FlashInferAttention, why_not_flashinfer
from quire.runtime.attention.gather import GatherAttention
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.attention.virtual import VirtualAttention, check_virtual
from quire.runtime.attention.virtual_flash import FlashVirtualAttention, can_flash
from quire.runtime.layers.weights import Placement
from quire.types.errors import ConfigError
from quire.types.install import install_extra

if TYPE_CHECKING:
    from quire.runtime.attention.prefill_scratch import ScratchConfig

USUAL_BLOCK_SIZE = 16


def resolve_backend(
    name: str,
    heads: Heads,
    placement: Placement,
    block_size: int = USUAL_BLOCK_SIZE,
    kv_dtype: torch.dtype | None = None,
    local_heads: Heads | None = None,
) -> str:
    """Return the name of the backend to run: for "auto" the fastest that can run here, otherwise `name` itself. Raises
    ConfigError if that backend cannot run.

    "auto" takes Triton on a GPU, the compiled kernels on a CPU, and torch if these cannot run; never FlashInfer.
    `kv_dtype`: dtype of the cache, by default the model's. `local_heads`: heads of the layers with a window, if they
    differ.
    """
    kinds = (heads,) if local_heads is None else (heads, local_heads)
    check_backend(name)
    if name == "auto":
        if placement.device.type != "cpu" and _why_not_triton(placement, kinds, block_size) is None:
            return "triton"
        return "native" if _why_not_native(placement, heads, kv_dtype) is None else "gather"
    reason = None
    if name == "native":
        reason = _why_not_native(placement, heads, kv_dtype)
    elif name == "triton":
        reason = _why_not_triton(placement, kinds, block_size)
    elif name == "flashinfer":
        reason = why_not_flashinfer(placement, heads, kv_dtype)
    elif name == VIRTUAL_BACKEND:
        check_virtual(placement.device)
    if reason is not None:
        install = f"{install_extra('flashinfer')}, or " if reason == NOT_INSTALLED else ""
        raise ConfigError("attention_backend", f"{name!r} cannot run here: {reason}", f'{install}use "auto"')
    return name


def _why_not_triton(placement: Placement, kinds: tuple[Heads, ...], block_size: int) -> str | None:
    reasons = (why_not_triton(placement.device, heads, block_size) for heads in kinds)
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_native(placement: Placement, heads: Heads, kv_dtype: torch.dtype | None) -> str | None:
    known = (placement.dtype, *((torch.float8_e4m3fn,) if heads.latent is not None else SCALED))
    if kv_dtype is not None and kv_dtype not in known:
        return f"its kernels do not support a KV cache of {str(kv_dtype).removeprefix('torch.')} for this model"
    dtype = torch.float32 if placement.dtype == torch.float16 else placement.dtype  # float16 is widened to float32
    return why_not_native(dtype, placement.device)


def make_backend(
    name: str,
    heads: Heads,
    compute: torch.dtype,
    placement: Placement,
    block_size: int = USUAL_BLOCK_SIZE,
    kv_dtype: torch.dtype | None = None,
    local_heads: Heads | None = None,
) -> AttentionBackend:
    """Make the backend called `name`. `compute` is the dtype in which torch backends multiply. FlashInfer and the
    virtual layout refuse layers with a window, so they need no `local_heads`."""
    chosen = resolve_backend(name, heads, placement, block_size, kv_dtype, local_heads)
    if chosen == "reference":
        return ReferenceAttention()
    if chosen == "gather":
        return GatherAttention(compute)
    if chosen == VIRTUAL_BACKEND:
        flash = can_flash(heads, placement.dtype, placement.device)
        return FlashVirtualAttention(placement.device) if flash else VirtualAttention(heads, compute)
    if chosen == "native":
        from quire.runtime.attention.native import HalfAttention, NativeAttention

        return HalfAttention() if placement.dtype == torch.float16 else NativeAttention()
    if chosen == "flashinfer":
        return FlashInferAttention(heads, placement, block_size)
    device = placement.device
    cache, rows = kv_dtype or placement.dtype, dependent_rows(device)
    if heads.latent is not None:
        from quire.runtime.attention.triton_latent import LatentTritonAttention

        return LatentTritonAttention(heads, cache, device, dependent_rows=rows)
    if local_heads is not None:
        from quire.runtime.attention.triton_mixed import MixedTritonAttention

        return MixedTritonAttention(heads, local_heads, cache, device, dependent_rows=rows)
    from quire.runtime.attention.triton import TritonAttention

    return TritonAttention(heads, cache, device, dependent_rows=rows, scratch=prefill_scratch(heads, cache, placement))


def prefill_scratch(heads: Heads, cache: torch.dtype, placement: Placement) -> ScratchConfig | None:
    """Return when chunks attend over a dequantized copy of a quantized cache, or None if they always read the cache
    itself. A copy is only faster with the attention kernel for Hopper GPUs, which reads only unquantized keys and does
    not support all head sizes."""
    from quire.kernels.triton.attention_prefill import takes_hopper
    from quire.runtime.attention.prefill_scratch import ScratchConfig

    pays = cache in SCALED and takes_hopper(heads.dim, placement.dtype, placement.device)
    return ScratchConfig(placement.dtype) if pays else None

"""The paged KV cache on a GPU: one kernel launch copies blocks in all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import CacheConfig
from quire.config.kv_cache import KVLayout
from quire.config.model import Heads
from quire.kernels.triton.copy import copy_blocks, gather_blocks, scatter_blocks
from quire.runtime.transfer import Uploader
from quire.runtime.worker.cache import KVCache, independent
from quire.types.step import BlockCopy


class DeviceCache(KVCache):
    """A KVCache that copies, gathers and scatters blocks by Triton kernels. The host does not wait for them."""

    def __init__(
        self, config: CacheConfig, heads: Heads, layout: KVLayout, dtype: torch.dtype, device: torch.device,
        local_heads: Heads | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, heads, layout, dtype, device, local_heads)
        self._uploader = Uploader(device)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for batch in independent(copies):
            pairs = np.array([(copy.source, copy.target) for copy in batch], dtype=np.int32)
            copy_blocks(self.blocks, self._uploader.upload(pairs)[0])

    def gather(self, block_ids: Tensor, staging: Tensor) -> None:
        gather_blocks(self.blocks, block_ids, staging)

    def scatter(self, staging: Tensor, block_ids: Tensor) -> None:
        scatter_blocks(staging, block_ids, self.blocks)

"""Numbers and bytes of the weights of a model, for the memory plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Numbers of weights, as the layers of a model count them themselves."""

    parameters: int = 0
    in_blocks: int = 0  # in the matrices of blocks, which quantization shrinks
    block_outputs: int = 0  # output features of these matrices, each of which has a scale
    adapter_width: int = 0  # summed inputs and outputs of the linear layers that LoRA adapters may change
    adapter_parts: int = 0  # the most such matrices in one layer
    adapter_expert_width: int = 0  # summed inputs and outputs of routed experts, for adapters that may change these
    int4_parameters: int = 0  # that a GPU holds quantized with quantization int4
    int4_bytes: int = 0  # of these
    plain_linears: int = 0  # in linear layers that quantization does not shrink, such as an untied output head
    tower: int = 0  # in the vision tower, which only the first pipeline stage has


@dataclass(frozen=True, slots=True)
class StoredLevels:
    """The weights that the model file stores quantized and that kernels can multiply without expanding them.

    Where ranks cut super-blocks, integer gemms hold these in groups of 16, which takes the `cut_*` bytes on top.
    """

    parameters: int = 0
    num_bytes: int = 0  # with the native CPU kernels
    integer_bytes: int = 0  # with their integer gemms; 0: these do not support them
    gpu_parameters: int = 0  # the weights that the Triton kernels multiply quantized
    gpu_bytes: int = 0  # of these
    gpu_is_float8: bool = False  # these need a GPU that multiplies float8
    has_table: bool = True  # the embedding table may be one of them
    table_bytes: int = 0  # on top of `num_bytes`, for embedding tables: a byte per weight and their factors
    expanded: int = 0  # weights that a CPU expands to values that bfloat16 does not hold exactly
    cut_heads_bytes: int = 0  # of matrices whose inputs are heads
    cut_sizes_bytes: int = 0  # of matrices whose inputs are an intermediate size

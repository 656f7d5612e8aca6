"""Bytes of quantized weights in the formats that the kernels read."""

from __future__ import annotations


def packed_bytes(num_weights: int, *, nibbles: bool) -> int:
    """Return the bytes of packed quantized weights. 32 weights take 16 bytes (nibbles) or 32, plus a scale and an
    offset."""
    return num_weights // 32 * (20 if nibbles else 36)


def integer_bytes(num_weights: int, least: int, most: int, *, has_offsets: bool, group: int) -> int:
    """Return an upper bound of the bytes of quantized weights, with values from `least` to `most`, in the panels of the
    CPU's integer kernels. `group`: weights per scale and, if `has_offsets`, per offset."""
    halves = group < 32
    widths = ((4,) if has_offsets else (4, 6)) if halves else (4, 5, 6)  # bit widths below 8 that have kernels
    bits = next((bits for bits in widths if _fits(bits, least, most, has_offsets=has_offsets)), 8)
    shared = 128 if bits == 4 and group % 128 == 0 else 16 if halves else 32  # weights per scale in the panels
    return num_weights * bits // 8 + num_weights // shared * 2 * (1 + has_offsets)


def table_bytes(num_weights: int, outputs: int) -> int:
    """Return the bytes of weights with at most 16 different values in panels of the integer kernels: 16 outputs have a
    lookup table of 64 bytes."""
    return num_weights // 32 * 18 + 4 * outputs


def super_block_bytes(num_weights: int, bits: int, *, has_offsets: bool) -> int:
    """Return the bytes of weights held as super-blocks in those panels: a byte of factors per 16 weights, and a float16
    scale, perhaps an offset too, per 256."""
    return num_weights * bits // 8 + num_weights // 16 + num_weights // 256 * 2 * (1 + has_offsets)


def _fits(bits: int, least: int, most: int, *, has_offsets: bool) -> bool:
    middle = 0 if has_offsets else 1 << (bits - 1)  # the stored value that means 0
    return least + middle >= 0 and most + middle < 1 << bits

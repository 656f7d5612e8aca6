"""Writes GGUF files, right ones and wrong ones, without help from the reader under test."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "I32": 26, "BF16": 30}
VOCAB, HIDDEN, INNER, QUERY_HEADS, KV_HEADS, HEAD_DIM = 64, 32, 64, 4, 2, 8


@dataclass(frozen=True)
class Stored:
    """A tensor to write; `offset` None: right after the one before."""

    name: str
    shape: tuple[int, ...]  # outermost first
    type_number: int
    data: bytes
    offset: int | None = None


def stored(name: str, values: np.ndarray, kind: str = "F32") -> Stored:
    if kind == "Q8_0":
        data = _q8_0(values)
    elif kind == "BF16":
        data = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        data = values.astype({"F32": np.float32, "F16": np.float16, "I32": np.int32}[kind]).tobytes()
    return Stored(name, values.shape, TYPE_NUMBERS[kind], data)


def write_gguf(
    path: Path,
    metadata: Mapping[str, object] | Sequence[tuple[str, object]],
    tensors: Sequence[Stored],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(text(key) + value(item) for key, item in pairs)
    body = b""
    for tensor in tensors:
        offset = len(body) if tensor.offset is None else tensor.offset
        head += text(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.type_number, offset)
        body = _pad(body + tensor.data, alignment)
    path.write_bytes(_pad(head, alignment) + body)
    return path


def text(content: str | bytes) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw)) + raw


def value(item: object) -> bytes:
    """A value led by its type. Bytes are written as they are: for values no writer should write."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, list):
        kind, content = _kind(item[0]), b"".join(_plain(entry) for entry in item)
        return struct.pack("<IIQ", 9, kind, len(item)) + content
    return struct.pack("<I", _kind(item)) + _plain(item)


def tiny_metadata(architecture: str = "llama", layers: int = 2, **extra: object) -> dict[str, object]:
    sizes: dict[str, object] = {
        "block_count": layers,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": QUERY_HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        **extra,
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": item for key, item in sizes.items() if item is not None},
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(VOCAB)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tiny_weights(layers: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of the tiny model under their GGUF names, query and key rows as a file has them."""
    rng = np.random.default_rng(seed)
    query, kv = QUERY_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(layers):
        block = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (query, HIDDEN), "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, query), "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_tiny_gguf(
    path: Path, weights: Mapping[str, np.ndarray] | None = None, kinds: Mapping[str, str] | None = None, **extra: object
) -> Path:
    weights = tiny_weights() if weights is None else weights
    kinds = kinds or {}
    return write_gguf(
        path, tiny_metadata(**extra), [stored(name, item, kinds.get(name, "F32")) for name, item in weights.items()]
    )


def _kind(item: object) -> int:
    if isinstance(item, bool):
        return 7
    return {int: 4, float: 6, str: 8}[type(item)]


def _plain(item: object) -> bytes:
    if isinstance(item, bool):
        return struct.pack("<?", item)
    if isinstance(item, str):
        return text(item)
    return struct.pack("<I" if isinstance(item, int) else "<f", item)


def _q8_0(values: np.ndarray) -> bytes:
    blocks = values.astype(np.float32).reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float16) / np.float16(127)
    whole = np.round(blocks / scale.astype(np.float32)).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), whole.view(np.uint8)], axis=1).tobytes()


def _pad(content: bytes, alignment: int) -> bytes:
    return content + b"\0" * (-len(content) % alignment)

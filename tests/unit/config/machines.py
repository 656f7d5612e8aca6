"""Machines and models made of numbers."""

from __future__ import annotations

from quire.config.facts import CudaDevice, HardwareFacts
from quire.config.model import Heads, ModelConfig, Rope
from quire.config.recurrent import Recurrent
from quire.config.sizes import GIB
from quire.runtime.models.build import count_weights

LAPTOP = HardwareFacts(
    machine="x86_64",
    cpu_name="laptop",
    cores=8,
    isa=frozenset({"avx2"}),
    supports_bf16=False,
    supports_fp16=False,
    total_memory=16 * GIB,
    available_memory=12 * GIB,
    torch_version="2.13.0",
)
SERVER = HardwareFacts(
    machine="x86_64",
    cpu_name="server",
    cores=64,
    isa=frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"}),
    supports_bf16=True,
    supports_fp16=True,
    total_memory=256 * GIB,
    available_memory=200 * GIB,
    torch_version="2.13.0",
    cuda=(CudaDevice("big", 80 * GIB, 79 * GIB, (9, 0)), CudaDevice("old", 16 * GIB, 15 * GIB, (7, 5))),
)
_SMALL = ModelConfig(
    architecture="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1_536,
    num_layers=30,
    heads=Heads(num_query=9, num_kv=3, dim=64),
    rope=Rope(max_position=8_192),
    norm_eps=1e-5,
    tie_word_embeddings=True,
)
LLAMA3 = (
    ("factor", 8.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 8_192.0),
)
_LARGE = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_layers=32,
    heads=Heads(num_query=32, num_kv=8, dim=128),
    rope=Rope(max_position=131_072, kind="llama3", scaling=LLAMA3),
    norm_eps=1e-5,
)
SMALL, LARGE = count_weights(_SMALL), count_weights(_LARGE)
_RECURRENT = ModelConfig(
    architecture="qwen3_5_text",
    vocab_size=248_320,
    hidden_size=1_024,
    intermediate_size=3_584,
    num_layers=24,
    heads=Heads(num_query=8, num_kv=2, dim=256),
    rope=Rope(max_position=262_144, dim=64),
    norm_eps=1e-6,
    tie_word_embeddings=True,
    attention_gate=True,
    recurrent=Recurrent(16, 16, 128, 128, 4, tuple(layer for layer in range(24) if layer % 4 != 3)),
)
RECURRENT = count_weights(_RECURRENT)

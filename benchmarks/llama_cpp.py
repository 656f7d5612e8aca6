"""llama.cpp through the C interface of a shared library, and the perplexity that it gives for a GGUF model."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)  # discards log lines
_Params = ctypes.c_uint64 * 128  # larger than any version's settings structure, which llama.cpp fills with defaults


class _Settings(ctypes.Structure):
    _fields_ = [("data", _Params)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def load_model(llama: ctypes.CDLL, model: Path) -> int:
    """Load a GGUF file, silently. Raises ValueError if llama.cpp cannot read it."""
    llama.llama_log_set(_SILENCE, None)
    llama.llama_backend_init()
    handle = llama.llama_model_load_from_file(str(model).encode(), llama.llama_model_default_params())
    if not handle:
        raise ValueError(f"llama.cpp cannot read {model}")
    return int(handle)


def llama_perplexity(library: Path, model: Path, tokens: Sequence[int], window: int, threads: int = 2) -> float:
    """Return the perplexity of all tokens except the first of each window, as in benchmarks.perplexity. `library`:
    exports llama.cpp's functions, like the one in the package xllamacpp."""
    llama = open_llama(library)
    handle = load_model(llama, model)
    settings = llama.llama_context_default_params()
    sizes = ctypes.cast(ctypes.pointer(settings), ctypes.POINTER(ctypes.c_uint32))
    sizes[0] = sizes[1] = sizes[2] = window  # n_ctx, n_batch, n_ubatch
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(handle))
    total, count = 0.0, 0
    for begin in range(0, len(tokens) - 1, window):
        part = list(tokens[begin : begin + window])
        if len(part) < 2:
            continue
        context = llama.llama_init_from_model(handle, settings)
        llama.llama_set_n_threads(context, threads, threads)
        logits = _run(llama, context, part, vocab)
        largest = logits.max(axis=1, keepdims=True)
        sums = np.log(np.exp(logits - largest).sum(axis=1)) + largest[:, 0]
        places = np.arange(len(part) - 1)
        total += float((sums[:-1] - logits[places, part[1:]]).sum())
        count += len(part) - 1
        llama.llama_free(context)
    llama.llama_model_free(handle)
    llama.llama_log_set(None, None)
    return math.exp(total / count)


def _run(llama: ctypes.CDLL, context: int, tokens: list[int], vocab: int) -> np.ndarray:  # [tokens, vocab]
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for place, token in enumerate(tokens):
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, place, 1
        batch.seq_id[place][0], batch.logits[place] = 0, 1
    if llama.llama_decode(context, batch):
        raise ValueError("llama.cpp could not run the window")
    found = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), vocab)).astype(np.float64)
    llama.llama_batch_free(batch)
    return found


def open_llama(library: Path) -> ctypes.CDLL:
    """Return the library with the signatures of the functions that benchmarks call."""
    llama, address = ctypes.CDLL(str(library)), ctypes.c_void_p
    kinds: dict[str, tuple[object, list[object]]] = {
        "llama_backend_init": (None, []),
        "llama_log_set": (None, [address, address]),
        "llama_model_default_params": (_Settings, []),
        "llama_context_default_params": (_Settings, []),
        "llama_model_load_from_file": (address, [ctypes.c_char_p, _Settings]),
        "llama_init_from_model": (address, [address, _Settings]),
        "llama_set_n_threads": (None, [address, ctypes.c_int32, ctypes.c_int32]),
        "llama_model_get_vocab": (address, [address]),
        "llama_vocab_n_tokens": (ctypes.c_int32, [address]),
        "llama_batch_init": (_Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
        "llama_batch_free": (None, [_Batch]),
        "llama_decode": (ctypes.c_int32, [address, _Batch]),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [address]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [address, ctypes.c_int32]),
        "llama_get_memory": (address, [address]),
        "llama_memory_clear": (None, [address, ctypes.c_bool]),
        "llama_free": (None, [address]),
        "llama_model_free": (None, [address]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama

"""Turns pooled states and logits into the result rows that users get. Does not need torch, so that a server's edges can
do it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.config.embedding import EmbeddingSettings
from quire.types.pooling import PoolingParams

Rows = npt.NDArray[np.float32]  # [texts, size]
_SMALLEST = np.float32(1e-12)  # vectors shorter than this are divided by it instead of their length, as in torch


def finish_rows(rows: Rows, settings: EmbeddingSettings, params: PoolingParams) -> Rows:
    """Return embeddings, cut to the requested dimensions and normalized if that is requested or the default. For a
    classifier, return its scores or probabilities."""
    classes = settings.classes
    if classes is not None:
        if not params.activate or classes.activation == "none":
            return rows
        return _sigmoid(rows) if classes.activation == "sigmoid" else _softmax(rows)
    if params.dimensions is not None:
        rows = rows[:, : params.dimensions]
    wants = settings.pooling.normalize if params.normalize is None else params.normalize
    if not wants:
        return np.ascontiguousarray(rows)
    found: Rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _SMALLEST)
    return found


def _sigmoid(rows: Rows) -> Rows:
    small = np.exp(-np.abs(rows))  # never overflows
    found: Rows = np.where(rows >= 0, 1, small) / (1 + small)
    return found.astype(np.float32)


def _softmax(rows: Rows) -> Rows:
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    found: Rows = powers / powers.sum(axis=1, keepdims=True)
    return found

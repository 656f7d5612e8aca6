"""Reads a classifier's labels and its output activation from config.json. Needs no torch."""

from __future__ import annotations

from quire.config.embedding import Activation, Classes
from quire.config.fields import Fields

USUAL = 2  # number of labels if config.json has none; transformers' default
_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def read_labels(config: Fields) -> tuple[str, ...]:
    """Return the names of the labels in the order of the logits. Raises ModelLoadError."""
    named = config.raw("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(config.integer("num_labels", USUAL, least=1)))
    numbers = [str(index) for index in range(len(named))] if isinstance(named, dict) else []
    if not isinstance(named, dict) or not named or sorted(map(str, named)) != sorted(numbers):
        raise config.refuse("id2label", "must name the labels 0, 1 and so on", fix="fetch the file again")
    return tuple(str(named[number]) for number in numbers)


def read_classes(config: Fields) -> Classes:
    """Return the labels and the activation: a cross-encoder's own, otherwise sigmoid for a single label or multi-label
    problems, otherwise softmax."""
    labels = read_labels(config)
    inner = config.raw("sentence_transformers")
    named = inner.get("activation_fn") if isinstance(inner, dict) else None
    named = named or config.raw("sbert_ce_default_activation_function")
    if named is not None:
        kind = str(named).rpartition(".")[2]
        if kind not in _ACTIVATIONS:
            fix = f"supported: {', '.join(_ACTIVATIONS)}"
            raise config.refuse("sentence_transformers", f"the activation {kind!r:.80} is not supported", fix=fix)
        return Classes(labels, _ACTIVATIONS[kind])
    together = len(labels) == 1 or config.raw("problem_type") == "multi_label_classification"
    return Classes(labels, "sigmoid" if together else "softmax")

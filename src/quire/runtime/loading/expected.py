"""Checks that a checkpoint has the tensors that its config implies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.config.model import ModelConfig
from quire.runtime.models.build import describe_weights
from quire.runtime.models.registry import find_family
from quire.types.errors import ModelLoadError

Shape = tuple[int, ...]
HEAD = "lm_head.weight"


def check_tensors(
    config: ModelConfig,
    names: Iterable[str],
    *,
    shape: Callable[[str], Shape],
    source: Callable[[str], str],
    file: str,
) -> None:
    """Refuse a checkpoint with a missing, unknown or wrongly shaped tensor.

    Runs before anything is allocated by the sizes in the config.
    """
    expected, present = describe_weights(config), {name for name in names if ".rotary_emb." not in name}
    if config.tie_word_embeddings and HEAD in present:
        expected[HEAD] = expected[
            find_family(config.architecture).embedding
        ]  # a second copy, which old exporters wrote
    for name, wanted in expected.items():
        if name not in present:
            raise ModelLoadError(file, "is missing from the checkpoint", tensor=name, fix="download the model again")
        if shape(name) != wanted:
            raise ModelLoadError(source(name), f"has shape {shape(name)}, the config says {wanted}", tensor=name)
    for name in sorted(present - expected.keys()):
        raise ModelLoadError(source(name), f"has no place in a {config.architecture} model of this config", tensor=name)

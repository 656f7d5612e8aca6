"""Checks new weights for a running model, and puts them into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from quire.config.model import ModelConfig, StoredLevels, WeightCounts
from quire.runtime.layers.weights import WeightLayer
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import ModelFiles, files_at
from quire.runtime.loading.given import GivenFile, tensors_of
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.runtime.loading.hf.safetensors import SafetensorsFile
from quire.runtime.loading.replace import WeightSet
from quire.runtime.loading.weights import check_names, check_shape
from quire.types.errors import ConfigError, InvalidRequest
from quire.types.standby import WeightUpdate

_FIELD = "weights"


class NewWeights:
    """Weights from which a running model's can be replaced. Names, shapes and values were checked; nothing has
    changed. `close` closes their files."""

    def __init__(self, checkpoint: Checkpoint, names: frozenset[str], *, is_all: bool) -> None:
        self._checkpoint, self.names, self.is_all = checkpoint, names, is_all

    def fill(self, layer: WeightLayer, part: str, name: str) -> None:
        """Load one part of a layer."""
        quantized = self._checkpoint.read_quantized(name, layer.region(part))
        if quantized is None:
            layer.load(part, self._checkpoint.read(name, partial(layer.used_part, part)))
        else:
            layer.load_quantized(part, quantized)

    def check(self, weights: WeightSet, *, has_graphs: bool) -> None:
        """Read all values once. Raises ModelLoadError or DoesNotMatch if the model cannot take them."""
        config = self._checkpoint.config
        if config.quantization is not None or not isinstance(self._checkpoint, HfCheckpoint):
            weights.rehearse(self.fill, self.names)
        else:
            for layer, part, name in weights.parts(self.names):
                self._checkpoint.read(name, partial(layer.used_part, part))
        if has_graphs and (number := weights.changed_number(self.fill, self.names)) is not None:
            reason = f"changes {number}, a number that captured graphs contain"
            raise InvalidRequest(_FIELD, reason, "start the engine with enforce_eager, or start it with these weights")

    def close(self) -> None:
        self._checkpoint.close()


def open_weights(
    update: WeightUpdate, files: ModelFiles, config: ModelConfig, weights: WeightSet, elsewhere: frozenset[str]
) -> NewWeights:
    """Open new weights and check their names and shapes. `config`: of the running model; `elsewhere`: tensors that it
    does not hold here. Raises InvalidRequest or ModelLoadError."""
    is_partial = update.is_partial or update.tensors is not None
    checkpoint = _open_some(update, files) if is_partial else _open_all(update, files, config)
    try:
        shapes, known = weights.shapes(), weights.shapes().keys() | elsewhere
        if is_partial:
            _check_some(checkpoint, weights, known)
        else:
            check_names(checkpoint, set(shapes), elsewhere)
        names = frozenset(checkpoint.names & shapes.keys())
        for name in sorted(names):
            check_shape(checkpoint, name, shapes[name])
        return NewWeights(checkpoint, names, is_all=names == shapes.keys())
    except BaseException:
        checkpoint.close()
        raise


def _open_all(update: WeightUpdate, files: ModelFiles, config: ModelConfig) -> Checkpoint:
    """Open a complete model and check that it has the running model's config."""
    try:
        found = files if update.path is None else files_at(Path(update.path))
    except ConfigError as error:
        raise InvalidRequest("model_path", error.reason, error.fix) from None
    checkpoint = open_checkpoint(found)
    if (differs := _difference(checkpoint.config, config)) is not None:
        checkpoint.close()
        reason = f"is a model whose {differs} differs from that of the running one"
        raise InvalidRequest("model_path", reason, "start an engine with it")
    return checkpoint


def _open_some(update: WeightUpdate, files: ModelFiles) -> Checkpoint:
    """Open tensors that were given by their names in the running model's checkpoint."""
    if files.kind != "hf":
        reason = "cannot be given by name, because the model was loaded from a GGUF file"
        raise InvalidRequest(_FIELD, reason, "load it from a folder of safetensors, or give the path of a GGUF file")
    given = SafetensorsFile(Path(str(update.path))) if update.is_partial else GivenFile(tensors_of(update.tensors))
    return HfCheckpoint(files.path, given)


def _check_some(checkpoint: Checkpoint, weights: WeightSet, known: Iterable[str]) -> None:
    """Refuse names that the model does not have, and layers of which only some tensors are given."""
    check_names(checkpoint, set(checkpoint.names) & set(known), frozenset())
    if not checkpoint.names:
        raise InvalidRequest(_FIELD, "are none", "give at least one tensor")
    for group in weights.groups():
        missing = [name for name in group if name not in checkpoint.names]
        if missing and len(missing) < len(group):
            reason = f"of one layer can only be replaced together, and {missing[0]} is missing"
            raise InvalidRequest(_FIELD, reason, f"give {group[0]} and it in one call")


def _difference(found: ModelConfig, running: ModelConfig) -> str | None:
    """Return the name of the first field by which two models differ, or None. The dtype of files, special tokens, and
    images and an indexer that the running model leaves out do not count."""
    blank = {"dtype": "float32", "bos_id": None, "eos_ids": (), "weights": WeightCounts(), "rank_weights": None}
    stage: dict[str, object] = {"stage": None, "levels": StoredLevels()}
    if running.vision is None and found.vision is not None:
        stage |= {"vision": None, "rope": running.rope}
    if running.indexer is None and found.indexer is not None:
        stage |= {"indexer": None, "context_limit": None}
    first, second = (replace(each, **blank, **stage) for each in (found, running))  # type: ignore[arg-type]
    names: Mapping[str, object] = {name: getattr(first, name) for name in ModelConfig.__dataclass_fields__}
    return next((name for name, value in names.items() if value != getattr(second, name)), None)


def save_tensors(tensors: object, path: Path) -> None:
    """Write (name, tensor) pairs to a safetensors file, for ranks in other processes. Raises InvalidRequest."""
    from safetensors.torch import save_file

    written: dict[str, Tensor] = {}
    for name, tensor in tensors_of(tensors).items():
        held = tensor.detach().cpu().contiguous()
        is_shared = any(held.data_ptr() == other.data_ptr() for other in written.values())
        written[name] = held.clone() if is_shared else held  # tensors of a file share no memory
    save_file(written, path)

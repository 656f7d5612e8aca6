"""Checks new weights for a running model, and puts them into it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from quire.config.model import ModelConfig
from quire.config.weight_counts import StoredLevels, WeightCounts
from quire.runtime.layers.weights import WeightLayer
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import ModelFiles, files_at
from quire.runtime.loading.given import GivenFile, tensors_of
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.runtime.loading.hf.mtp import has_head
from quire.runtime.loading.hf.safetensors import SafetensorsFile
from quire.runtime.loading.replace import WeightSet
from quire.runtime.loading.weights import TIED_HEAD, check_names, check_shape, differing_head
from quire.runtime.models.registry import find_family
from quire.types.errors import ConfigError, InvalidRequest
from quire.types.standby import WeightUpdate

_FIELD = "weights"


class NewWeights:
    """Weights from which a running model's can be replaced. Names, shapes and values were checked; nothing has
    changed. `close` closes their files."""

    def __init__(self, checkpoint: Checkpoint, names: frozenset[str], *, is_all: bool) -> None:
        self._checkpoint, self.names, self.is_all = checkpoint, names, is_all
        self.is_empty = not checkpoint.names  # no layer of any rank reads what was given

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
    is_partial = _is_partial(update)
    checkpoint = _open_some(update, files) if is_partial else _open_all(update, files, config)
    try:
        known = weights.shapes().keys() | elsewhere
        if is_partial:
            check_names(checkpoint, set(checkpoint.names) & known, frozenset())
            _check_tied_head(checkpoint, weights, known)
            _check_groups(checkpoint, weights)
        else:
            check_names(checkpoint, set(weights.shapes()), elsewhere)
        return _checked(checkpoint, weights)
    except BaseException:
        checkpoint.close()
        raise


def open_head(
    update: WeightUpdate, files: ModelFiles, config: ModelConfig, weights: WeightSet, elsewhere: frozenset[str]
) -> NewWeights | None:
    """Open new weights of the MTP head in a model's checkpoint, as `open_weights` does. None: the new weights have none
    for the head."""
    is_partial = _is_partial(update)
    if is_partial:
        checkpoint: Checkpoint = _open_some(update, files, is_head=True)
    else:
        found = files if update.path is None else files_at(Path(update.path))
        if found.kind != "hf" or not has_head(found.path, config):
            return None
        checkpoint = open_checkpoint(replace(found, is_head=True))
    try:
        if is_partial and not checkpoint.names:
            checkpoint.close()
            return None
        given = checkpoint.names & (weights.shapes().keys() | elsewhere) if is_partial else set(weights.shapes())
        check_names(checkpoint, set(given), frozenset() if is_partial else elsewhere)
        _check_groups(checkpoint, weights)
        return _checked(checkpoint, weights)
    except BaseException:
        checkpoint.close()
        raise


def _is_partial(update: WeightUpdate) -> bool:
    return update.is_partial or update.tensors is not None


def _checked(checkpoint: Checkpoint, weights: WeightSet) -> NewWeights:
    """Check the shapes of the tensors that these layers load."""
    shapes = weights.shapes()
    names = frozenset(checkpoint.names & shapes.keys())
    for name in sorted(names):
        check_shape(checkpoint, name, shapes[name])
    return NewWeights(checkpoint, names, is_all=names == shapes.keys())


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


def _open_some(update: WeightUpdate, files: ModelFiles, *, is_head: bool = False) -> HfCheckpoint:
    """Open tensors that were given by their names in the running model's checkpoint."""
    if files.kind != "hf":
        reason = "cannot be given by name, because the model was loaded from a GGUF file"
        raise InvalidRequest(_FIELD, reason, "load it from a folder of safetensors, or give the path of a GGUF file")
    given = SafetensorsFile(Path(str(update.path))) if update.is_partial else GivenFile(tensors_of(update.tensors))
    if not given.tensors:
        raise InvalidRequest(_FIELD, "are none", "give at least one tensor")
    return HfCheckpoint(files.path, given, is_head=is_head)


def _check_groups(checkpoint: Checkpoint, weights: WeightSet) -> None:
    """Refuse layers of which only some tensors are given."""
    for group in weights.groups():
        missing = [name for name in group if name not in checkpoint.names]
        if missing and len(missing) < len(group):
            reason = f"of one layer can only be replaced together, and {missing[0]} is missing"
            raise InvalidRequest(_FIELD, reason, f"give {group[0]} and it in one call")


def _check_tied_head(checkpoint: Checkpoint, weights: WeightSet, known: Collection[str]) -> None:
    """Refuse an output head for a tied model, whose embedding comes in another call, unless it equals the running
    embedding. (`check_names` compares it with an embedding of the same call.)"""
    table = find_family(checkpoint.config.architecture).embedding
    if TIED_HEAD not in checkpoint.names or TIED_HEAD in known or table in checkpoint.names:
        return
    shape = weights.shapes().get(table)
    if shape is None:  # another rank holds the table
        return
    has_shape = tuple(checkpoint.shape(TIED_HEAD)) == shape
    if not has_shape or not weights.holds(table, lambda layer, part, _: layer.load(part, checkpoint.read(TIED_HEAD))):
        raise differing_head(checkpoint)


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

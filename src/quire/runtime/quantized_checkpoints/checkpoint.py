"""Writes a quantized checkpoint in the compressed-tensors format, one block of the model at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from quire import __version__
from quire.kernels.reference.quantize import quantize_rows
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.modules import TiedHead
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.runtime.loading.hf.directory import INDEX
from quire.runtime.loading.hf.json_file import read_json
from quire.runtime.loading.hf.quantized.registry import KEYS
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.packing import pack
from quire.runtime.quantized_checkpoints.calibrate import Calibration, PlainModel, check_plain
from quire.runtime.quantized_checkpoints.gptq import Grid, RoundedMatrix, round_matrix
from quire.types.errors import ConfigError

Method = Literal["int4", "int8", "fp8"]
Shared = Literal["channel", "tensor", "block"]  # float8 weights that share a scale
Progress = Callable[[str, int, int], None]  # what, done, total
GROUPS = (128, 64, 32)  # int4 group sizes in order of preference; a given one must be a multiple of the last
FP8_BLOCK = 128  # float8 blocks are 128 x 128
_LEFT = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
_CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to quantize a checkpoint. `texts`: token ids of calibration texts of equal length; empty: quantize without
    data."""

    method: Method
    group_size: int | None = None
    head: bool = False
    texts: Sequence[Sequence[int]] = ()
    fp8_scales: Shared = "channel"


@torch.inference_mode()
def write_quantized(
    source: ModelFiles, target: Path, recipe: Recipe, device: torch.device, progress: Progress | None = None
) -> int:
    """Quantize the matrices of all blocks of `source` into a new folder; returns how many. Files are written to
    `target`.partial, which is renamed to `target` when complete. Raises ConfigError if the model, the recipe or the
    folder is not suitable."""
    target = target.resolve()
    _check(source, target, recipe)
    partial = target.with_name(f"{target.name}.partial")
    checkpoint = HfCheckpoint(source.path)
    try:
        writer = _Writer(checkpoint, partial, recipe, device)
        with _new_folder(partial, target):
            count = writer.write(progress)
            writer.copy_rest(source.path)
    finally:
        checkpoint.close()
    return count


@contextmanager
def _new_folder(partial: Path, target: Path) -> Iterator[None]:
    """Create the empty folder `partial`, and rename it to `target` at the end. Removes it on any failure. Raises
    ConfigError for file system errors."""
    try:
        if partial.exists():
            shutil.rmtree(partial)  # left by a killed run
        partial.mkdir(parents=True)
        yield
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        fix = "give a folder that can be written, on a disk with room for it"
        raise ConfigError("output", f"{target} cannot be written: {error}", fix) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check(source: ModelFiles, target: Path, recipe: Recipe) -> None:
    if source.kind != "hf":
        raise ConfigError("model", f"{source.path.name} is a GGUF file", "give a folder of safetensors files")
    if any(key in read_json(source.path / "config.json") for key in KEYS):
        raise ConfigError("model", f"{source.name} is quantized already", "give the checkpoint it was made from")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("output", f"{target} is there already", "give a folder that is empty or not there yet")
    if target == Path.cwd() or target.is_mount():
        kind = "a mount point" if target.is_mount() else "the working folder"
        raise ConfigError("output", f"{target} is {kind}, which cannot be replaced", "give a folder inside it")
    if source.path.resolve().is_relative_to(target.with_name(f"{target.name}.partial")):
        raise ConfigError("output", f"{target.name}.partial is where files are written first", "give another name")
    if recipe.method == "fp8" and recipe.texts:
        raise ConfigError(
            "calibration", "fp8 uses no calibration: each weight is rounded to the nearest value", "leave it out"
        )
    if recipe.method != "fp8" and recipe.fp8_scales != "channel":
        raise ConfigError(
            "fp8_scales", f"applies to fp8 only, and the method is {recipe.method}", "leave it out, or use fp8"
        )
    if recipe.method != "int4" and recipe.group_size is not None:
        raise ConfigError("group_size", f"{recipe.method} has one scale for each output", "leave it out, or use int4")


class _Writer:
    def __init__(self, checkpoint: HfCheckpoint, target: Path, recipe: Recipe, device: torch.device) -> None:
        self._checkpoint, self._target, self._recipe, self._device = checkpoint, target, recipe, device
        self._config = checkpoint.config
        check_plain(self._config)
        if strange := sorted(checkpoint.stored_names ^ checkpoint.names):
            problem = f"{strange[0]} is stored under another name or fused with others"
            raise ConfigError("model", problem, "set quantization instead")
        self._model = PlainModel(self._config, device)
        matrices = self._matrices()
        if not matrices:
            raise ConfigError("model", "has no matrices that can be quantized", "give another model")
        self._group = _choose_group(recipe, matrices) if recipe.method == "int4" else None
        self._places: dict[str, str] = {}  # tensor name to file name
        self._num_files, self._num_bytes = self._config.num_layers + 1, 0

    def write(self, progress: Progress | None) -> int:
        """Write one file per block, then one for the remaining tensors. Returns the number of quantized matrices."""
        calibration, rounded = None, PlainModel(self._config, self._device)
        if self._recipe.texts:
            calibration = Calibration(self._config, self._recipe.texts, self._device)
            for layer in self._model.in_front:
                self._model.fill(layer, self._read(layer))
            calibration.embed(self._model)
        count = 0
        for number, block in enumerate(self._model.blocks):
            count += self._write_block(number, block, rounded, calibration)
            if progress is not None:
                progress("quantizing blocks", number + 1, self._config.num_layers)
        count += self._write_rest(calibration)
        names = dict(sorted(self._places.items()))
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": names}
        (self._target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        return count

    def copy_rest(self, source: Path) -> None:
        """Copy all files that are no weights, then write config.json last, so that a folder with a config is
        complete."""
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name != "config.json" and not path.name.endswith(_LEFT):
                shutil.copyfile(path, self._target / path.name)
        used = sum(map(len, self._recipe.texts))
        how = f"GPTQ over {used:,} tokens of calibration text" if used else "rounded without data"
        with (self._target / _CARD).open("a", encoding="utf-8") as card:
            card.write(f"\nQuantized to {self._recipe.method} by quire {__version__} from `{source.name}`: {how}.\n")
        config = read_json(source / "config.json")
        config["quantization_config"] = quantization_config(
            self._recipe, self._group, self._head() if self._recipe.head else None
        )
        (self._target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    def _write_block(self, number: int, block: nn.Module, rounded: PlainModel, calibration: Calibration | None) -> int:
        tensors = self._read(block)
        sums: dict[str, Tensor] = {}
        if calibration is not None:
            self._model.fill(block, tensors)
            by_layer = calibration.record(block)
            for layer, parts in self._model.parts_of(block):
                sums |= {name: by_layer[id(layer)] for name in parts if id(layer) in by_layer}
        stored: dict[str, Tensor] = {}
        kept = dict(tensors)
        names = [name for layer, parts in self._model.parts_of(block) for name in parts if _takes(layer, name)]
        for name in names:
            words, kept[name] = self._quantize(tensors[name], sums.get(name))
            stored |= {f"{name.removesuffix('weight')}{word}": tensor for word, tensor in words.items()}
        stored |= {name: tensor for name, tensor in tensors.items() if name not in names}
        self._save(stored, number)
        if calibration is not None:
            rounded.fill(rounded.blocks[number], kept)
            calibration.advance(rounded.blocks[number])
        self._model.forget(number)
        rounded.forget(number)
        return len(names)

    def _write_rest(self, calibration: Calibration | None) -> int:
        names = [name for name in sorted(self._checkpoint.names) if not self._is_written(name)]
        stored = {name: self._checkpoint.read(name) for name in names}
        head = self._head() if self._recipe.head else None
        if head is not None:
            total = None
            if calibration is not None:
                self._model.fill(self._model.norm, self._read(self._model.norm))
                total = calibration.of_head(self._model.norm)
            words, _ = self._quantize(stored.pop(f"{head}.weight"), total)
            stored |= {f"{head}.{word}": tensor for word, tensor in words.items()}
        self._save(stored, self._config.num_layers)
        return int(head is not None)

    def _quantize(self, weight: Tensor, total: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """Return the tensors to store, by their suffix, and the dequantized matrix."""
        dtype, numbers = weight.dtype, weight.to(self._device, torch.float32)
        if self._recipe.method == "fp8":
            found = _float8(numbers, self._recipe.fp8_scales)
            scales = found.scales.reshape(1) if self._recipe.fp8_scales == "tensor" else found.scales
            return {"weight": found.numbers.cpu(), "weight_scale": scales.cpu()}, found.values()
        grid = Grid(4, self._group, False) if self._recipe.method == "int4" else Grid(8, None, True)
        matrix = round_matrix(numbers, grid, total, dtype)
        words = _packed(matrix) if grid.bits == 4 else _bytes(matrix)
        return {word: tensor.cpu().contiguous() for word, tensor in words.items()}, matrix.values()

    def _head(self) -> str:
        if isinstance(self._model.head, TiedHead):
            reason = "the model's head is its embedding table (tie_word_embeddings)"
            raise ConfigError("head", reason, "leave it out: the table is not quantized")
        ((_, parts),) = self._model.parts_of(self._model.head)
        return next(name for name in parts if name.endswith(".weight")).removesuffix(".weight")

    def _matrices(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the matrices to quantize, by name."""
        if self._recipe.head:
            self._head()
        found: dict[str, tuple[int, ...]] = {}
        for layer, parts in self._model.parts_of(self._model.blocks):
            for name, part in parts.items():
                if _takes(layer, name):
                    assert isinstance(layer, Linear)
                    if layer.part_shape(part) != self._checkpoint.shape(name) or layer.stored[_own(part)].transposed:
                        raise ConfigError(
                            "model", f"{name} is stored transposed ([inputs, outputs])", "set quantization instead"
                        )
                    found[name] = self._checkpoint.shape(name)
        return found

    def _read(self, module: nn.Module) -> dict[str, Tensor]:
        return {name: self._checkpoint.read(name) for _, parts in self._model.parts_of(module) for name in parts}

    def _is_written(self, name: str) -> bool:
        return name in self._places or f"{name}_scale" in self._places

    def _save(self, tensors: dict[str, Tensor], number: int) -> None:
        file = f"model-{number + 1:05d}-of-{self._num_files:05d}.safetensors"
        whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}  # save_file refuses views
        save_file(whole, self._target / file, metadata={"format": "pt"})
        self._places |= dict.fromkeys(tensors, file)
        self._num_bytes += sum(tensor.nbytes for tensor in whole.values())


def quantization_config(recipe: Recipe, group: int | None, head: str | None) -> dict[str, Any]:
    """Return `quantization_config` of a compressed-tensors checkpoint. `head`: the output head's name if it is
    quantized. It is a separate target, because in other engines its class is not Linear."""
    method = recipe.method
    common = {"symmetric": method != "int4", "observer": "minmax", "dynamic": False}
    weights: dict[str, Any]
    if method == "int4":
        form, weights = "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
        activations = None
    else:
        form, kind = ("int-quantized", "int") if method == "int8" else ("float-quantized", "float")
        weights = {"num_bits": 8, "type": kind, "strategy": recipe.fp8_scales}
        activations = weights | {"strategy": "token", "symmetric": True, "dynamic": True}
        if recipe.fp8_scales == "block":
            weights |= {"block_structure": [FP8_BLOCK, FP8_BLOCK]}
            activations |= {"strategy": "group", "group_size": FP8_BLOCK}
    targets = ["Linear"] if head is None else ["Linear", f"re:.*{re.escape(head.rpartition('.')[2])}"]
    scheme = {"targets": targets, "weights": weights | common, "input_activations": activations,
              "output_activations": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ["lm_head"] if head is None else [], "kv_cache_scheme": None,
    }  # fmt: skip


def _float8(weight: Tensor, shared: Shared) -> Float8Weight:  # [outputs, inputs], float32
    """Round each weight to the nearest float8 value, with scales that map the largest weight sharing one to 448."""
    outputs, inputs = weight.shape
    block = {"channel": (1, inputs), "tensor": (outputs, inputs), "block": (FP8_BLOCK, FP8_BLOCK)}[shared]
    counts = [-(-size // part) for size, part in zip(weight.shape, block, strict=True)]
    padded = F.pad(weight, (0, counts[1] * block[1] - inputs, 0, counts[0] * block[0] - outputs))
    blocks = padded.view(counts[0], block[0], counts[1], block[1]).transpose(1, 2)
    numbers, scale = quantize_rows(blocks.reshape(counts[0] * counts[1], -1))
    whole = numbers.view(torch.uint8).view(*counts, *block).transpose(1, 2).reshape(padded.shape)
    found = whole[:outputs, :inputs].contiguous().view(numbers.dtype)
    return Float8Weight(found, scale.view(counts), block)


def _takes(layer: object, name: str) -> bool:
    return isinstance(layer, Linear) and layer.is_quantizable and name.endswith(".weight")


def _own(part: str) -> str:
    return part.rpartition(".")[0]


def _choose_group(recipe: Recipe, matrices: dict[str, tuple[int, ...]]) -> int:
    given = recipe.group_size
    if given is not None and (given < 1 or given % GROUPS[-1]):
        raise ConfigError("group_size", f"must be a multiple of {GROUPS[-1]}, is {given}", "use 32, 64 or 128")
    for size in GROUPS if given is None else (given,):
        wrong = next((name for name, shape in matrices.items() if shape[1] % size), None)
        if wrong is None:
            return size
    reason = f"groups of {size} do not divide the {matrices[wrong or ''][1]} inputs of {wrong}"
    raise ConfigError("group_size", reason, "use a multiple of 32 that does, or int8")


def _packed(matrix: RoundedMatrix) -> dict[str, Tensor]:
    """Return the stored tensors of an int4 matrix. Zero points are packed along the outputs."""
    levels, scales, zeros = matrix
    return {
        "weight_packed": pack(levels.cpu(), 4),
        "weight_scale": scales,
        "weight_zero_point": pack(zeros.cpu().t().contiguous(), 4).t(),
        "weight_shape": torch.tensor(levels.shape),
    }


def _bytes(matrix: RoundedMatrix) -> dict[str, Tensor]:
    return {"weight": (matrix.levels - 128).to(torch.int8), "weight_scale": matrix.scales}

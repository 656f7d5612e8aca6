"""Reads a PEFT folder: maps its tensors to the model's matrices and checks that they fit."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.runtime.adapters.fused import FusedSizes, experts_module, find_parameter, fused_sizes
from quire.runtime.adapters.peft import CONFIG, PeftConfig, read_peft_config, refuse
from quire.runtime.adapters.slots import AdapterSlots, HostAdapter, Pair, Target
from quire.runtime.layers.weights import weight_layers
from quire.runtime.loading.hf.checkpoint import WEIGHT_DTYPES
from quire.runtime.loading.hf.json_file import parse_json
from quire.runtime.loading.hf.names import PartNames
from quire.runtime.loading.hf.safetensors import SafetensorsFile
from quire.runtime.loading.mapping import HeldFile
from quire.runtime.loading.values import refuse_non_finite
from quire.runtime.models.base import BaseModel
from quire.runtime.models.registry import find_family
from quire.types.errors import InvalidRequest, ModelLoadError

logger = logging.getLogger(__name__)
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 16 << 20  # allowance for the weight file's header
_PREFIX = "base_model.model."
_HEAD = "lm_head"  # its name in the model
_MOST_CHARACTERS = 512  # of a tensor's name
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_OTHERS = {  # PEFT tensors that are not A or B of a linear module
    "lora_embedding_": "adapters of embeddings are not supported",
    "lora_magnitude_vector": "DoRA is not supported",
    "modules_to_save": "whole modules in adapters are not supported",
    ".lora_A.bias": "biases of adapters are not supported",
    ".lora_B.bias": "biases of adapters are not supported",
    "lora_ga": "LoRA-GA is not supported",
}
_WITHOUT = "train the adapter without this module, or merge it into the model's weights"


class _Sides(NamedTuple):
    """The names of a module's A and B in the file."""

    a: str
    b: str


class _Known(NamedTuple):
    """A module of the file that the model has. `name`: the layers' name of its matrix, without `.weight`. `fused`: set
    for a parameter that stacks all experts, whose gemm is at `path`."""

    module: str
    name: str
    sides: _Sides
    rank: int
    scale: float
    fused: FusedSizes | None = None
    path: str = ""


class AdapterReader:
    """Reads adapters for one model. Safe to call from any thread. A pipeline stage keeps only the pairs of its own
    layers, and checks those; the digest covers all tensors."""

    def __init__(self, model: BaseModel, config: ModelConfig, slots: AdapterSlots) -> None:
        self._slots, self._config = slots, config
        self._family = family = find_family(config.architecture)
        self._prefixes = ("", f"{family.embedding.partition('.')[0]}.")
        self._names = [PartNames(config, family, prefix) for prefix in self._prefixes]
        self._layers = {name: type(layer).__name__ for layer, parts in weight_layers(model) for name in parts}
        self._elsewhere = model.elsewhere | (frozenset() if config.is_last_stage else {f"{_HEAD}.weight"})
        self._expert_paths = _expert_paths(self._layers)
        self._experts_elsewhere = _expert_paths(self._elsewhere) - self._expert_paths  # no expert on this rank
        width = -(-self._width() * config.num_layers // len(config.layers))  # extrapolated to all stages
        width += config.embedding_size + config.vocab_size  # the head may be on another stage
        if config.experts is not None and slots.config.experts:
            width += config.num_layers * config.experts.num * 3 * (config.hidden_size + config.experts.size)
        self._max_bytes = _HEADER_BYTES + slots.config.max_rank * width * max(
            dtype.itemsize for dtype in WEIGHT_DTYPES.values()
        )

    def read(self, folder: str) -> HostAdapter:
        """Read an adapter. Raises InvalidRequest if the folder holds none, if it does not fit the model, or if reading
        it fails unexpectedly, so that no adapter can stop the engine."""
        try:
            return self._read(Path(folder))
        except InvalidRequest:
            raise
        except ModelLoadError as error:
            where = Path(error.file).name + (f": {error.tensor}" if error.tensor else "")
            raise InvalidRequest("lora_path", f"{where}: {error.reason}", error.fix) from None
        except Exception as error:
            logger.exception("the LoRA adapter in %s could not be read", folder)
            reason = f"reading the adapter failed with {type(error).__name__}"
            raise InvalidRequest("lora_path", reason, "see the log of the engine") from None

    def _read(self, folder: Path) -> HostAdapter:
        if not folder.is_dir():
            raise InvalidRequest("lora_path", "the folder is not there", "check the path")
        if not (folder / CONFIG).exists():
            raise InvalidRequest("lora_path", f"{CONFIG} is not in the folder", "give the folder that PEFT saved")
        config = read_peft_config(
            parse_json(bytes(HeldFile(folder / CONFIG, _MAX_CONFIG_BYTES).data), str(folder / CONFIG))
        )
        if not (folder / WEIGHTS).is_file():
            if (folder / PICKLED).exists():
                fix = f"save it again with safetensors (PEFT: save_pretrained(safe_serialization=True)) as {WEIGHTS}"
                raise InvalidRequest("lora_path", f"{PICKLED} is a pickle, which is not read", fix)
            raise InvalidRequest("lora_path", f"{WEIGHTS} is not in the folder", "give the folder that PEFT saved")
        return self._read_file(SafetensorsFile(HeldFile(folder / WEIGHTS, self._max_bytes)), config)

    def _width(self) -> int:
        """Return the sum of inputs and outputs of all matrices that an adapter may change, except those of experts."""
        layers, firsts = self._slots.layers, [targets[0] for targets in self._slots.targets.values()]
        return sum(sum(layers[each.layer].parts[each.part].shape) for each in firsts if each.expert < 0)

    def _read_file(self, file: SafetensorsFile, config: PeftConfig) -> HostAdapter:
        sizes = fused_sizes(self._config, self._family, inputs_first=config.takes_inputs_first)
        found = [self._known(module, sides, file, config, sizes) for module, sides in _modules(file.tensors).items()]
        if not found:
            fix = "give a LoRA adapter that was trained for this model"
            raise InvalidRequest("lora_path", f"{WEIGHTS} changes no module of the model", fix)
        _refuse_duplicates({known.sides.a: self._targets_of(known) for known in found})
        digest, pairs, rank = hashlib.sha256(b"quire adapter 1"), list[Pair](), 0
        experts: dict[Target, list[tuple[int, _Known]]] = {}  # stored separately for each expert
        for known in sorted(found, key=lambda each: each.name):  # so that the digest does not depend on spelling
            targets = self._targets_of(known)
            if targets:
                self._check(file, known, targets[0], config)
            digest.update(f"\n{known.name} {known.scale!r}".encode())
            for side in known.sides:
                stored = file.tensors[side]
                digest.update(f" {stored.dtype} {stored.shape}".encode())
                digest.update(file.raw(side).data)
            rank = max(rank, known.rank)
            if targets and known.fused is not None:
                pairs += self._fused_pairs(file, known, known.fused, targets[0].layer)
            elif targets and targets[0].expert >= 0:
                experts.setdefault(targets[0]._replace(expert=-1), []).append((targets[0].expert, known))
            elif targets:
                pairs += self._pairs(known, *_matrices(file, known))
        pairs += [self._expert_pair(file, target, each) for target, each in experts.items()]
        return HostAdapter(digest.hexdigest(), rank, tuple(sorted(pairs, key=lambda pair: pair.target)))

    def _known(
        self, module: str, sides: _Sides, file: SafetensorsFile, config: PeftConfig, sizes: dict[str, FusedSizes]
    ) -> _Known:
        """Find the model's matrix for a module of the file. Raises InvalidRequest if there is none or it cannot be
        adapted."""
        if (all_experts := experts_module(module)) is not None:
            return self._known_fused(all_experts, sides, file, config, sizes)
        found = [names.of(f"{module}.weight") for names in self._names]
        known = [name.removesuffix(".weight") for name in found if name is not None]
        for name in known:
            if name in self._slots.targets or f"{name}.weight" in self._elsewhere:
                pattern = config.pattern_name(module)
                return _Known(module, name, sides, config.rank_of(pattern), config.scale_of(pattern))
        is_there = any(f"{name}.weight" in self._layers for name in known)
        raise self._refused_module(module, sides.a, is_there=is_there)

    def _known_fused(
        self, module: str, sides: _Sides, file: SafetensorsFile, config: PeftConfig, sizes: dict[str, FusedSizes]
    ) -> _Known:
        """Like `_known`, for a parameter that stacks the matrices of all experts of a block."""
        shapes = file.tensors[sides.a].shape, file.tensors[sides.b].shape
        parameter = find_parameter(sizes, *shapes)
        paths = [path for names in self._names if (path := names.of(f"{module}.{parameter}")) is not None]
        for path in paths:
            is_elsewhere = path.rpartition(".")[0] in self._experts_elsewhere and self._slots.config.experts
            if parameter is not None and (path in self._slots.gemms or is_elsewhere):
                pattern, fused = f"{module}.{parameter}", sizes[parameter]
                name = f"{path} by inputs" if fused.inputs_first else path
                return _Known(pattern, name, sides, config.rank_of(pattern), config.scale_of(pattern), fused, path)
        is_there = any(path.rpartition(".")[0] in self._expert_paths | self._experts_elsewhere for path in paths)
        if is_there and parameter is None and self._slots.config.experts:
            reason = f"{WEIGHTS}: {sides.a} and {sides.b} have shapes {list(shapes[0])} and {list(shapes[1])}"
            reason += ", which fit no parameter of the experts"
            raise InvalidRequest("lora_path", reason, "the adapter was trained for another model")
        raise self._refused_module(module, sides.a, is_there=is_there)

    def _refused_module(self, module: str, tensor: str, *, is_there: bool) -> InvalidRequest:
        reason, fix = _refused_reason(module, is_there=is_there), _WITHOUT
        if is_there and ".experts." in f"{module}." and not self._slots.config.experts:
            reason, fix = "adapters of routed experts are not enabled", "set lora_experts (--lora-experts)"
        return InvalidRequest("lora_path", f"{WEIGHTS}: {tensor}: {reason}", fix)

    def _targets_of(self, known: _Known) -> Sequence[Target]:
        """Return the matrices that a module changes; empty if they are on other ranks."""
        if known.fused is None:
            return self._slots.targets.get(known.name, ())
        if known.path not in self._slots.gemms:
            return ()
        layer, experts = self._slots.gemms[known.path]
        parts = range(len(self._slots.layers[layer].parts))
        return [Target(layer, part, expert) for expert in range(len(experts)) for part in parts]

    def _check(self, file: SafetensorsFile, known: _Known, target: Target, config: PeftConfig) -> None:
        """Check shapes, rank and fan_in_fan_out."""
        part, limit, rank = self._slots.layers[target.layer].parts[target.part], self._slots.config.max_rank, known.rank
        outputs, inputs = part.shape
        if rank > limit:
            fix = f"raise max_lora_rank to {rank}, or train a smaller one"
            raise InvalidRequest("lora_path", f"{known.module} has rank {rank}, the limit is {limit}", fix)
        shapes = ((rank, inputs), (outputs, rank)) if known.fused is None else known.fused.shapes(rank)
        for side, wanted in zip(known.sides, shapes, strict=True):
            if (found := file.tensors[side].shape) != wanted:
                reason = f"{side} has shape {list(found)}, the model and {CONFIG} say {list(wanted)}"
                raise InvalidRequest("lora_path", reason, "the adapter was trained for another model")
        if part.transposed != config.by_inputs and known.name != _HEAD:  # PEFT uses the head's stored layout
            refuse("fan_in_fan_out", f"is {config.by_inputs}, but the model's {known.module} has the other layout",
                   f"set it to {part.transposed}")  # fmt: skip

    def _pairs(self, known: _Known, a: Tensor, b: Tensor) -> list[Pair]:
        return [self._pair(target, known.sides, a, b) for target in self._slots.targets[known.name]]

    def _expert_pair(self, file: SafetensorsFile, target: Target, each: Sequence[tuple[int, _Known]]) -> Pair:
        """Stack the matrices of single experts, with zeros for experts that the adapter does not change."""
        num_experts, rank = self._slots.num_experts[target.layer], max(known.rank for _, known in each)
        outputs, inputs = self._slots.layers[target.layer].parts[target.part].shape
        all_a, all_b = torch.zeros(num_experts, rank, inputs), torch.zeros(num_experts, outputs, rank)
        for expert, known in each:
            a, b = _matrices(file, known)
            all_a[expert, : known.rank], all_b[expert, :, : known.rank] = a, b
        return self._pair(target, each[0][1].sides, all_a, all_b)

    def _fused_pairs(self, file: SafetensorsFile, known: _Known, fused: FusedSizes, layer: int) -> list[Pair]:
        a, b = fused.matrices(*(_values(file, side).float() for side in known.sides))
        _, experts = self._slots.gemms[known.path]
        own, parts = slice(experts.start, experts.stop), self._slots.layers[layer].parts
        a, b = a[own], b[own].mul(torch.tensor(known.scale, dtype=torch.float32))
        return [
            self._pair(Target(layer, place), known.sides, a, fused.part(b, place, len(parts)))
            for place in range(len(parts))
        ]

    def _pair(self, target: Target, sides: _Sides, a: Tensor, b: Tensor) -> Pair:
        """Return the pair as this rank holds it, from a [..., rank, inputs] and b [..., outputs, rank]."""
        slots = self._slots
        part = slots.layers[target.layer].parts[target.part]
        mine = b if part.index is None else b.index_select(-2, part.index)
        own, rank = part.inputs.of(a, a.dim() - 1), -(-a.shape[-2] // slots.rank_step) * slots.rank_step
        held_a = self._hold(sides.a, own, (*own.shape[:-2], rank, own.shape[-1]))
        return Pair(target, held_a, self._hold(sides.b, mine, (*mine.shape[:-1], rank)))

    def _hold(self, name: str, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Copy values into a zero-padded tensor, in pinned memory for a GPU. Raises InvalidRequest if a value overflows
        the dtype. The compiled kernels multiply float32 rows by bfloat16, so values that bfloat16 holds exactly take
        half the memory."""
        is_exact = self._slots.kernels == "native" and torch.equal(values.bfloat16().to(values.dtype), values)
        dtype = torch.bfloat16 if is_exact else self._slots.dtype
        held = torch.zeros(shape, dtype=dtype, pin_memory=self._slots.device.type == "cuda")
        held[tuple(slice(size) for size in values.shape)].copy_(values)
        if not torch.isfinite(held).all():
            kind = str(dtype).removeprefix("torch.")
            reason = f"{WEIGHTS}: {name}: values are not finite in {kind} (B is multiplied by the adapter's scale)"
            raise InvalidRequest("lora_path", reason, "train with a smaller lora_alpha, or run the model in bfloat16")
        return held


def _modules(tensors: Collection[str]) -> dict[str, _Sides]:
    """Return the modules of the file by their names in the model. Every tensor must be the A or B of one."""
    found: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        if len(tensor) > _MOST_CHARACTERS:
            reason = f"{WEIGHTS}: {tensor[:80]}... has {len(tensor)} characters, the limit is {_MOST_CHARACTERS}"
            raise InvalidRequest("lora_path", reason, "save the adapter again")
        matched = _NAME.fullmatch(tensor)
        if matched is None:
            reason = next((text for word, text in _OTHERS.items() if word in tensor), "is no A or B of a LoRA adapter")
            raise InvalidRequest("lora_path", f"{WEIGHTS}: {tensor}: {reason}", _WITHOUT)
        module = matched["module"].removeprefix(_PREFIX)
        if experts_module(module) is None:
            module = module.removesuffix(".base_layer")
        if matched["side"] in found.setdefault(module, {}):
            raise InvalidRequest("lora_path", f"{WEIGHTS}: {tensor} is there twice", "save the adapter again")
        found[module][matched["side"]] = tensor
    for sides in found.values():
        if len(sides) < 2:
            ((side, tensor),) = sides.items()
            other = "B" if side == "A" else "A"
            raise InvalidRequest("lora_path", f"{WEIGHTS}: {tensor} is there without its {other}", "save it again")
    return {module: _Sides(sides["A"], sides["B"]) for module, sides in found.items()}


def _refuse_duplicates(targets: Mapping[str, Sequence[Target]]) -> None:
    """Raise InvalidRequest if two tensors A change the same matrix because its module is spelled in two ways."""
    seen: dict[Target, str] = {}
    for tensor, mine in targets.items():
        for target in mine:
            if target in seen:
                reason = f"{WEIGHTS}: {seen[target]} and {tensor} are of the same module"
                raise InvalidRequest("lora_path", reason, "save the adapter again, with one of them")
            seen[target] = tensor


def _expert_paths(tensors: Collection[str]) -> frozenset[str]:
    """Return the modules of routed experts to which these checkpoint tensors belong."""
    return frozenset(name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name)


def _matrices(file: SafetensorsFile, known: _Known) -> tuple[Tensor, Tensor]:
    """Return A, and B times the scale in float32."""
    a, b = (_values(file, side) for side in known.sides)
    return a, b.float().mul_(torch.tensor(known.scale, dtype=torch.float32))


def _refused_reason(module: str, *, is_there: bool) -> str:
    """Return why a module is refused. `is_there`: the model has the module."""
    if module.endswith(("embed_tokens", "wte", "embed_in", "word_embeddings")):
        reason = "adapters of embeddings are not supported"
    elif any(word in module for word in ("visual", "vision", "multi_modal_projector")):
        reason = "adapters of vision towers are not supported"
    elif is_there:
        reason = "this layer of the model cannot be adapted"
    else:
        reason = "the model has no such module"
    return reason


def _values(file: SafetensorsFile, name: str) -> Tensor:
    """Return a tensor of the file as a view."""
    stored, raw = file.tensors[name], file.raw(name)
    dtype = WEIGHT_DTYPES.get(stored.dtype)
    if dtype is None:
        raise ModelLoadError(file.name, f"has dtype {stored.dtype}", tensor=name, fix=f"use {', '.join(WEIGHT_DTYPES)}")
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    values = torch.from_numpy(raw).view(dtype).view(stored.shape)
    refuse_non_finite(values, file.name, name)
    return values

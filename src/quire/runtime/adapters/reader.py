"""Reads a PEFT folder: which matrices of the model its tensors change, and whether they fit."""

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
_HEADER_BYTES = 16 << 20  # of a file of weights beside its numbers
_PREFIX = "base_model.model."
_HEAD = "lm_head"  # as the layers call it
_MOST_CHARACTERS = 512  # of the name of a tensor
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_OTHERS = {  # tensors of PEFT that are no A or B of a linear module
    "lora_embedding_": "adapters of embeddings are not supported",
    "lora_magnitude_vector": "DoRA is not supported",
    "modules_to_save": "whole modules in adapters are not supported",
    ".lora_A.bias": "biases of adapters are not supported",
    ".lora_B.bias": "biases of adapters are not supported",
    "lora_ga": "LoRA-GA is not supported",
}
_WITHOUT = "train the adapter without this module, or merge it into the model's weights"


class _Sides(NamedTuple):
    """The tensors of a module in the file."""

    a: str
    b: str


class AdapterReader:
    """Reads adapters for one model. May be called from any thread. A pipeline stage holds what changes its own layers;
    the digest is of all tensors, and every stage checks those of its layers."""

    def __init__(self, model: BaseModel, config: ModelConfig, slots: AdapterSlots) -> None:
        self._slots = slots
        family = find_family(config.architecture)
        self._prefixes = ("", f"{family.embedding.partition('.')[0]}.")
        self._names = [PartNames(config, family, prefix) for prefix in self._prefixes]
        self._layers = {name: type(layer).__name__ for layer, parts in weight_layers(model) for name in parts}
        self._elsewhere = model.elsewhere | (frozenset() if config.is_last_stage else {f"{_HEAD}.weight"})
        width = -(-self._width() * config.num_layers // len(config.layers))  # of all stages
        width += config.hidden_size + config.vocab_size  # the head may be on another
        self._max_bytes = _HEADER_BYTES + slots.config.max_rank * width * max(
            dtype.itemsize for dtype in WEIGHT_DTYPES.values()
        )

    def read(self, folder: str) -> HostAdapter:
        """Raises InvalidRequest for a folder that holds no adapter, one that does not fit the model, or one at which
        this code itself fails: no adapter ends the engine."""
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
        """Inputs and outputs of all matrices that an adapter may change."""
        layers, firsts = self._slots.layers, [targets[0] for targets in self._slots.targets.values()]
        return sum(sum(layers[layer].parts[part].shape) for layer, part in firsts)

    def _read_file(self, file: SafetensorsFile, config: PeftConfig) -> HostAdapter:
        modules = {module: self._known(module, sides) for module, sides in _modules(file.tensors).items()}
        if not modules:
            fix = "give a LoRA adapter that was trained for this model"
            raise InvalidRequest("lora_path", f"{WEIGHTS} changes no module of the model", fix)
        _refuse_duplicates({sides.a: self._slots.targets.get(name, ()) for name, sides in modules.values()})
        digest, pairs, rank = hashlib.sha256(b"quire adapter 1"), list[Pair](), 0
        for module, (name, sides) in sorted(modules.items(), key=lambda each: each[1]):  # however modules are spelled
            is_own = name in self._slots.targets
            if is_own:
                self._check(file, module, name, sides, config)
            scale = config.scale_of(module)
            digest.update(f"\n{name} {scale!r}".encode())
            for side in sides:
                stored = file.tensors[side]
                digest.update(f" {stored.dtype} {stored.shape}".encode())
                digest.update(file.raw(side).data)
            rank = max(rank, file.tensors[sides.a].shape[0])
            if not is_own:
                continue
            a, b = (_values(file, side) for side in sides)
            pairs += self._pairs(name, sides, a, b.float().mul_(torch.tensor(scale, dtype=torch.float32)))
        return HostAdapter(digest.hexdigest(), rank, tuple(sorted(pairs, key=lambda pair: pair.target)))

    def _known(self, module: str, sides: _Sides) -> tuple[str, _Sides]:
        """The layers' name of a module's matrix, without `.weight`. A module that they cannot adapt is refused."""
        found = [names.of(f"{module}.weight") for names in self._names]
        known = [name.removesuffix(".weight") for name in found if name is not None]
        for name in known:
            if name in self._slots.targets or f"{name}.weight" in self._elsewhere:
                return name, sides
        raise _refused_module(module, sides.a, [name for name in known if f"{name}.weight" in self._layers])

    def _check(self, file: SafetensorsFile, module: str, name: str, sides: _Sides, config: PeftConfig) -> None:
        """Shapes and rank."""
        layer, place = self._slots.targets[name][0]
        stack = self._slots.layers[layer]
        part, limit = stack.parts[place], self._slots.config.max_rank
        outputs, inputs = part.shape
        rank = config.rank_of(module)
        if rank > limit:
            fix = f"raise max_lora_rank to {rank}, or train a smaller one"
            raise InvalidRequest("lora_path", f"{module} has rank {rank}, the limit is {limit}", fix)
        for side, wanted in ((sides.a, (rank, inputs)), (sides.b, (outputs, rank))):
            if (found := file.tensors[side].shape) != wanted:
                reason = f"{side} has shape {list(found)}, the model and {CONFIG} say {list(wanted)}"
                raise InvalidRequest("lora_path", reason, "the adapter was trained for another model")
        if part.turned != config.by_inputs and name != _HEAD:  # PEFT takes the head as it is stored
            refuse("fan_in_fan_out", f"is {config.by_inputs}, and the model's {module} is stored otherwise",
                   f"set it to {part.turned}")  # fmt: skip

    def _pairs(self, name: str, sides: _Sides, a: Tensor, b: Tensor) -> list[Pair]:
        slots, pairs = self._slots, []
        for target in slots.targets[name]:
            part = slots.layers[target.layer].parts[target.part]
            mine = b if part.index is None else b.index_select(0, part.index)
            rank = -(-len(a) // slots.rank_step) * slots.rank_step
            own = part.inputs.of(a, 1)
            held = self._hold(sides.a, own, (rank, own.shape[1])), self._hold(sides.b, mine, (len(mine), rank))
            pairs.append(Pair(target, *held))
        return pairs

    def _hold(self, name: str, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """A copy with zeros behind, in memory that is copied to the device without waiting. Raises InvalidRequest if
        a value is too large for the dtype. Compiled kernels multiply float32 rows by bfloat16: what that holds exactly
        takes half the memory."""
        is_exact = self._slots.kernels == "native" and torch.equal(values.bfloat16().to(values.dtype), values)
        dtype = torch.bfloat16 if is_exact else self._slots.dtype
        held = torch.zeros(shape, dtype=dtype, pin_memory=self._slots.device.type == "cuda")
        held[: values.shape[0], : values.shape[1]].copy_(values)
        if not torch.isfinite(held).all():
            kind = str(dtype).removeprefix("torch.")
            reason = f"{WEIGHTS}: {name}: values are not finite in {kind}, B's times the scale of the adapter"
            raise InvalidRequest("lora_path", reason, "train with a smaller lora_alpha, or run the model in bfloat16")
        return held


def _modules(tensors: Collection[str]) -> dict[str, _Sides]:
    """The modules that the file has tensors of, as the model calls them. Every tensor must be one of A and B."""
    found: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        if len(tensor) > _MOST_CHARACTERS:
            reason = f"{WEIGHTS}: {tensor[:80]}... has {len(tensor)} characters, the limit is {_MOST_CHARACTERS}"
            raise InvalidRequest("lora_path", reason, "save the adapter again")
        matched = _NAME.fullmatch(tensor)
        if matched is None:
            reason = next((text for word, text in _OTHERS.items() if word in tensor), "is no A or B of a LoRA adapter")
            raise InvalidRequest("lora_path", f"{WEIGHTS}: {tensor}: {reason}", _WITHOUT)
        module = matched["module"].removeprefix(_PREFIX).removesuffix(".base_layer")
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
    """Raise InvalidRequest if two tensors A of the file change the same matrix: its module is spelled in two ways."""
    seen: dict[Target, str] = {}
    for tensor, mine in targets.items():
        for target in mine:
            if target in seen:
                reason = f"{WEIGHTS}: {seen[target]} and {tensor} are of the same module"
                raise InvalidRequest("lora_path", reason, "save the adapter again, with one of them")
            seen[target] = tensor


def _refused_module(module: str, tensor: str, layers: list[str]) -> InvalidRequest:
    """`layers`: what the model calls the module, if it has it."""
    if ".experts." in module or module.endswith(".experts"):
        reason = "adapters of routed experts are not supported"
    elif module.endswith(("embed_tokens", "wte", "embed_in", "word_embeddings")):
        reason = "adapters of embeddings are not supported"
    elif any(word in module for word in ("visual", "vision", "multi_modal_projector")):
        reason = "adapters of vision towers are not supported"
    elif layers:
        reason = "this layer of the model cannot be adapted"
    else:
        reason = "the model has no such module"
    return InvalidRequest("lora_path", f"{WEIGHTS}: {tensor}: {reason}", _WITHOUT)


def _values(file: SafetensorsFile, name: str) -> Tensor:
    """A tensor of the file, as a view of it."""
    stored, raw = file.tensors[name], file.raw(name)
    dtype = WEIGHT_DTYPES.get(stored.dtype)
    if dtype is None:
        raise ModelLoadError(file.name, f"has dtype {stored.dtype}", tensor=name, fix=f"use {', '.join(WEIGHT_DTYPES)}")
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    values = torch.from_numpy(raw).view(dtype).view(stored.shape)
    refuse_non_finite(values, file.name, name)
    return values

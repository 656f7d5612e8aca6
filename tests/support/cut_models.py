"""The first layers and tokens of a GGUF Llama, stored again in any format. They run faster than the whole model, and
their weights are still those of a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gguf_encoders import BLOCK, encode
from gguf_files import Stored, write_gguf
from gguf_to_hf import gguf_to_hf
from quire.runtime.loading.gguf.dequantize import dequantize
from quire.runtime.loading.gguf.reader import GgufFile
from quire.runtime.loading.gguf.types import GGML_TYPES, TYPE_BY_NAME
from quire.runtime.loading.hf.quantized.awq import ORDER
from quire.runtime.quantization.packing import pack

GROUP = 64  # inputs that share a scale, of GPTQ and AWQ
_TYPE_NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}


@dataclass
class CutModel:
    """`layers` and `tokens`: how many of the file's are kept; `folder` gets the files."""

    source: Path
    layers: int
    tokens: int
    folder: Path

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Their numbers, under their names in a GGUF file."""
        file, found = GgufFile(self.source), {}
        for name, tensor in file.tensors.items():
            _, in_layer, rest = name.partition("blk.")
            if in_layer and int(rest.split(".")[0]) >= self.layers:
                continue
            values = dequantize(torch.frombuffer(file.raw(name), dtype=torch.uint8), tensor.ggml_type)
            rows = self.tokens if name == "token_embd.weight" else tensor.shape[0]
            found[name] = values.view(tensor.shape)[:rows].float().numpy().copy()
        file.close()
        return found

    @cached_property
    def wide_tensors(self) -> dict[str, np.ndarray]:
        """The same model with more hidden numbers and heads, all of them zeros, so that blocks of 256 divide every row.
        Norms take the mean over more numbers, which their weights make up for."""
        found = {}
        for name, values in self.tensors.items():
            wide = np.pad(values, [(0, -size % BLOCK) for size in values.shape])
            found[name] = wide * np.float32((len(values) / len(wide)) ** 0.5) if values.ndim == 1 else wide
        return found

    def gguf(self, name: str, types: Callable[[str], str]) -> Path:
        """A GGUF file whose matrices have the types that `types` gives to their names."""
        kinds = {each: types(each) for each, values in self.tensors.items() if values.ndim == 2}
        is_wide = any(TYPE_BY_NAME[kind].block_values == BLOCK for kind in kinds.values())
        tensors = self.wide_tensors if is_wide else self.tensors
        stored = [
            Stored(each, values.shape, _TYPE_NUMBERS[kind], encode(values, kind))
            for each, values in tensors.items()
            for kind in [kinds.get(each, "F32")]
        ]
        return write_gguf(self.folder / f"{name}.gguf", self._metadata(tensors), stored)

    def _metadata(self, tensors: dict[str, np.ndarray]) -> dict[str, object]:
        file = GgufFile(self.source)
        given = {name: item for name, item in file.metadata.items() if name.startswith("llama.")}
        file.close()
        dim, hidden = int(str(given["llama.rope.dimension_count"])), len(tensors["output_norm.weight"])
        return {
            "general.architecture": "llama",
            **given,
            "llama.block_count": self.layers,
            "llama.vocab_size": self.tokens,
            "llama.embedding_length": hidden,
            "llama.attention.head_count": hidden // dim,
            "llama.attention.head_count_kv": len(tensors["blk.0.attn_k.weight"]) // dim,
            "tokenizer.ggml.tokens": [f"token{i}" for i in range(self.tokens)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }

    @cached_property
    def plain(self) -> Path:
        """A Hugging Face folder, in bfloat16."""
        return gguf_to_hf(self.gguf("plain", lambda _: "BF16"), self.folder / "plain", dtype=torch.bfloat16)

    def packed(self, name: str, config: dict[str, object], pack_matrix: Callable[[Tensor], dict[str, Tensor]]) -> Path:
        """A copy of the folder, each matrix of the layers packed, with this `quantization_config`."""
        folder, tensors = self.folder / name, {}
        for each, values in load_file(self.plain / "model.safetensors").items():
            layer = each.removesuffix(".weight")
            parts = pack_matrix(values.float()) if layer.endswith("_proj") else {"weight": values}
            tensors.update({f"{layer}.{word}": part.contiguous() for word, part in parts.items()})
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        written = json.loads((self.plain / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
        return folder

    def gptq(self, name: str, bits: int, *, in_order: bool = True) -> Path:
        config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": not in_order, "sym": False}

        def pack_matrix(weight: Tensor) -> dict[str, Tensor]:
            inputs = weight.shape[1]
            # 7 divides no number of inputs here: neighbours are of different groups
            order = torch.arange(inputs) if in_order else torch.arange(inputs) * 7 % inputs
            levels, scales, zeros = _levels(weight[:, order], bits)
            back = order.argsort()
            return {
                "qweight": pack(levels[:, back], bits).t(),
                "qzeros": pack((zeros.t() - 1) & ((1 << bits) - 1), bits),
                "scales": scales.t(),
                "g_idx": (back // GROUP).int(),
            }

        return self.packed(name, config, pack_matrix)

    def awq(self, name: str) -> Path:
        config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
        places = torch.tensor(ORDER).argsort()

        def by_outputs(numbers: Tensor) -> Tensor:  # [n, outputs] -> [n, words]
            return pack(numbers.view(len(numbers), -1, len(ORDER))[..., places].flatten(1), 4)

        def pack_matrix(weight: Tensor) -> dict[str, Tensor]:
            levels, scales, zeros = _levels(weight, 4)
            return {"qweight": by_outputs(levels.t()), "qzeros": by_outputs(zeros.t()), "scales": scales.t()}

        return self.packed(name, config, pack_matrix)


def _levels(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [outputs, inputs], and scales in float16 and zero points [outputs, groups]."""
    groups, most = weight.view(len(weight), -1, GROUP), (1 << bits) - 1
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = ((high - low) / most).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(0, most)
    levels = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, most)
    return levels.reshape(weight.shape).int(), scales, zeros.int()

"""The memory plan of a CPU counts the bytes that built models hold, for every family and every weight format."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from family_models import CASES, settings_of, write_line_break
from gguf_files import Stored, tiny_metadata, write_gguf
from make_quantized import FIXTURES
from packed_models import PACKED
from quire.config.model import CpuWeights, ModelConfig, Quantization
from quire.config.parallel import ParallelConfig
from quire.config.rank_model import largest_rank
from quire.config.weight_memory import weight_memory
from quire.kernels.native.int8_panels import is_int8_format
from quire.kernels.native.loader import open_library, why_not_native
from quire.kernels.native.ops import INT8_OUTPUTS, PackedWeight, has_tile_units
from quire.kernels.native.tiles import PAIR_OUTPUTS
from quire.runtime.hardware import detect_hardware
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.rotary import Rotary
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.gguf.types import GGML_TYPES, TYPE_BY_NAME, GgmlType
from quire.runtime.loading.hf.config import hf_model_config
from quire.runtime.loading.weights import load_weights, randomize_weights
from quire.runtime.models.build import build_model, count_rank_weights
from tests.unit.runtime.parallel.test_rank_memory import ranks_of
from tiny_models import engine_config

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
CPU_WEIGHTS: tuple[CpuWeights, ...] = ("integer", "float")
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256}  # whose inputs fill groups of 64
FAMILY_SIZES: dict[str, dict[str, int]] = {  # that follow from them, or from the towers of tests/support
    "mamba2": {"head_dim": 64}, "mamba": {"intermediate_size": 512}, "falcon_mamba": {"intermediate_size": 512},
    "gemma3n_text": {"vocab_size_per_layer_input": 500}, "gemma4_text": {"vocab_size_per_layer_input": 512},
    "granitemoehybrid": {"shared_intermediate_size": 64},
    "nemotron_h-moe": {"moe_shared_expert_intermediate_size": 64},
    "nemotron_h-latents": {"moe_shared_expert_intermediate_size": 64, "moe_latent_size": 64},
    "xglm": {"d_model": 256, "ffn_dim": 256},
    "opt": {"word_embed_proj_dim": 256, "ffn_dim": 256},
    "glm4v": {"hidden_size": 64}, "glm4v_moe": {"hidden_size": 64}, "qwen2_vl": {"hidden_size": 64},
    "qwen2_5_vl": {"hidden_size": 64}, "qwen3_vl": {"hidden_size": 64}, "qwen3_vl_moe": {"hidden_size": 64},
}  # fmt: skip
# The plans of these tiny models are up to 3 % above what they hold; larger matrices make it less.
WITHIN = {
    ("deepseek_v2", "int4"): 0.03,
    # Rates of Mamba layers are float32, which counts in tiny matrices.
    ("mamba", "int8"): 0.04,
    ("mamba", "int4"): 0.04,
    ("falcon_mamba", None): 0.03,
    ("falcon_mamba", "int8"): 0.06,
    ("falcon_mamba", "int4"): 0.06,
    ("gemma4_text", "int4"): 0.03,
    # Their tiny indexers have fewer outputs than a panel.
    ("deepseek_v32", "int8"): 0.03,
    ("deepseek_v32", "int4"): 0.05,
    ("glm_moe_dsa", "int4"): 0.03,
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def reachable(root: object) -> Iterator[object]:
    """All objects that can be reached from one, but tables of angles and the modules of Python."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | Rotary):
            continue
        seen.add(id(each))
        yield each
        todo += each.__closure__ or () if isinstance(each, types.FunctionType) else gc.get_referents(each)


def held_bytes(model: nn.Module) -> float:
    """Of the memory of all tensors, each once; but for the outputs that panels and tiles are filled up with."""
    storages: dict[int, int] = {}
    padding = 0.0
    for each in reachable(model):
        if isinstance(each, Tensor) and each.dtype != torch.int64:  # orders of columns are no weights
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, PackedWeight):
            padding += each.data.nbytes * (1 - each.outputs / (-(-each.outputs // width_of(each)) * width_of(each)))
    return sum(storages.values()) - padding


def width_of(weight: PackedWeight) -> int:
    """The outputs of a panel, or of two tiles."""
    if is_int8_format(weight):
        return INT8_OUTPUTS
    is_tiled = weight.dtype == torch.bfloat16 and has_tile_units()
    return PAIR_OUTPUTS if is_tiled else int(open_library().quire_panel_outputs())


def check(
    config: ModelConfig, fill: Callable[[Any], None], dtype: str, cpu_weights: CpuWeights,
    quantization: Quantization | None = None, within: float = 0.02, num_ranks: int = 1,
) -> None:  # fmt: skip
    """Compare the plan with what the rank holds that holds most."""
    engine = engine_config(device="cpu", dtype=dtype, quantization=quantization, cpu_weights=cpu_weights)
    engine = replace(engine, parallel=ParallelConfig(tensor=num_ranks))
    planned_for = largest_rank(count_rank_weights(config, engine.parallel), engine.parallel)
    planned = weight_memory(planned_for, engine, detect_hardware(), has_triton=False)
    held = []
    for ranks in ranks_of(num_ranks):
        builder = LayerBuilder(engine.device, config.heads, 4, local_heads=config.local_heads, ranks=ranks)
        model = build_model(config, builder)
        fill(model)
        held.append(held_bytes(model))
    assert max(held) == pytest.approx(planned, rel=within), f"{max(held) / planned:.3f} of the plan"


def family_config(folder: Path, name: str) -> ModelConfig:
    transformers = pytest.importorskip("transformers")
    settings = settings_of(name, SIZES, FAMILY_SIZES.get(name, {}))
    kind = name.partition("-")[0]
    packed = PACKED.get(kind)
    config = transformers.AutoConfig.for_model(packed.source if packed else kind, **settings, dtype="bfloat16")
    config.architectures = [_class_of(transformers, config)]
    config.save_pretrained(folder)
    if name == "cohere2_vision":
        write_line_break(folder)
    if packed is not None:
        packed.pack_config(folder)
    return hf_model_config(folder)


def _class_of(transformers: Any, config: Any) -> str:
    if config.model_type == "mistral4":  # published within Mistral 3's class, so that AutoModel does not know it
        return "Mistral4ForCausalLM"
    kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    return str(getattr(transformers, f"AutoModelFor{kind}")._model_mapping[type(config)].__name__)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", None), ("bfloat16", None), ("float32", "int8"), ("float32", "int4"), ("bfloat16", "int8")],
)
@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_a_family_take_what_is_planned(
    name: str, dtype: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    config = family_config(tmp_path, name)
    within = WITHIN.get((name, quantization), 0.02)
    check(config, lambda model: randomize_weights(model, 3, torch.bfloat16), dtype, "integer", quantization, within)


@pytest.mark.parametrize("cpu_weights", CPU_WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_the_weights_of_a_quantized_checkpoint_take_what_is_planned(
    name: str, dtype: str, cpu_weights: CpuWeights
) -> None:
    files = files_at(FIXTURES / name)
    config = open_checkpoint(files).config
    check(config, lambda model: load_weights(model, open_checkpoint(files)), dtype, cpu_weights)


def random_blocks(kind: GgmlType, count: int) -> bytes:
    """Levels of all values, and scales that float16 holds."""
    generator = torch.Generator().manual_seed(count)
    if kind.name in PLAIN:
        return torch.randn(count, generator=generator).to(PLAIN[kind.name]).view(torch.uint8).numpy().tobytes()
    blocks = torch.randint(1, 60, (count, kind.block_bytes), generator=generator).to(torch.uint8)
    if kind.name == "Q8_K":
        blocks[:, :4] = torch.tensor([0.01]).view(torch.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = 120
    return blocks.numpy().tobytes()


def write_random(path: Path, kind: str, *, tied: bool, inner: int = 512) -> Path:
    """A GGUF file of a Llama whose matrices are random blocks of a type."""
    hidden, vocab, dim = 256, 512, 64
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    shapes |= {} if tied else {"output": (vocab, hidden)}
    block = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (4 * dim, hidden), "attn_k": (2 * dim, hidden),
        "attn_v": (2 * dim, hidden), "attn_output": (hidden, 4 * dim), "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    numbers = {each.name: number for number, each in GGML_TYPES.items()}
    tensors = []
    for name, shape in shapes.items():
        own = TYPE_BY_NAME["F32" if len(shape) == 1 else kind]
        size = torch.Size(shape).numel() // own.block_values
        tensors.append(Stored(f"{name}.weight", shape, numbers[own.name], random_blocks(own, size)))
    sizes = {"embedding_length": hidden, "feed_forward_length": inner}
    metadata = tiny_metadata(layers=1, **sizes) | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(vocab)]}
    return write_gguf(path, metadata, tensors)


KINDS = [kind.name for kind in GGML_TYPES.values() if kind.is_quantized or kind.name in PLAIN]


@pytest.mark.parametrize("cpu_weights", CPU_WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_gguf_file_take_what_is_planned(
    kind: str, tied: bool, dtype: str, cpu_weights: CpuWeights, tmp_path: Path
) -> None:
    files = files_at(write_random(tmp_path / "model.gguf", kind, tied=tied))
    config = open_checkpoint(files).config
    check(config, lambda model: load_weights(model, open_checkpoint(files)), dtype, cpu_weights)


@pytest.mark.parametrize("inner", [512, 768])
@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K"])
def test_ranks_that_cut_super_blocks_take_what_is_planned(kind: str, inner: int, tmp_path: Path) -> None:
    """Each of two has 128 inputs of heads, and 256 or 384 of the intermediate size."""
    files = files_at(write_random(tmp_path / "model.gguf", kind, tied=False, inner=inner))
    config = open_checkpoint(files).config
    check(config, lambda model: load_weights(model, open_checkpoint(files)), "float32", "integer", num_ranks=2)

"""Writes tests/fixtures/quantized: tiny checkpoints as the tools that quantize models write them.

Run it in an environment with transformers, gptqmodel, llmcompressor, autoawq and bitsandbytes, in the root folder:

    python tests/support/make_quantized.py [NAME ...]

Beside each checkpoint lies `expected.safetensors`: the product of every quantized matrix, as the tool itself
dequantizes it, with `probe` of its inputs; what it makes of `sample` as activations of QUERY, where it quantizes them;
and the logits of TOKENS, where the tool can run the model on a CPU.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FIXTURES = Path(__file__).parent.parent / "fixtures" / "quantized"
KEPT = ("config.json", "model.safetensors")
TOKENS = (3, 17, 42, 5, 60, 11, 29, 8)
QUERY = "model.layers.0.self_attn.q_proj"
SAMPLES = [[(7 * i + 3 * j) % 61 + 2 for i in range(24)] for j in range(8)]


def probe(inputs: int) -> Tensor:
    return torch.sin(torch.arange(1, inputs + 1, dtype=torch.float64))


def sample(inputs: int) -> Tensor:
    """Activations of three tokens, of different sizes."""
    return torch.outer(torch.tensor([0.1, 1.0, 8.0]), probe(inputs).float() * 2)


def plain_model(folder: Path, *, hidden: int = 64) -> Path:
    """A random Llama with a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.08,
        bos_token_id=0, eos_token_id=1, rms_norm_eps=1e-5,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w1").save_pretrained(
        folder
    )
    return folder


def gptq(target: Path, plain: Path, **settings: Any) -> dict[str, Tensor]:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(plain), QuantizeConfig(group_size=32, device="cpu", **settings))
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in SAMPLES]
    model.quantize(samples, batch_size=1)
    model.save(str(target))
    loaded = GPTQModel.load(str(target), device="cpu", backend=BACKEND.TORCH)
    expected = {
        name: module.dequantize_weight().t().double() @ probe(module.in_features)
        for name, module in loaded.model.named_modules()
        if hasattr(module, "dequantize_weight")
    }
    return expected | {"logits": logits(loaded.model)}


def awq(target: Path, plain: Path) -> dict[str, Tensor]:
    """Packed by the layers of AutoAWQ, whose search for scales no longer runs: the weights are rounded as they are."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    tensors, group, expected, packed = load_file(plain / "model.safetensors"), 32, {}, {}
    for name, weight in tensors.items():
        if "_proj" not in name:
            packed[name] = weight
            continue
        groups = weight.float().reshape(len(weight), -1, group)
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        scales = ((high - low).clamp(min=1e-5) / 15).half()
        zeros = (-torch.round(low / scales.float())).clamp(0, 15)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        rounded = (torch.round(groups / scales.float()[..., None]) + zeros[..., None]).clamp(0, 15)
        linear.weight.data = ((rounded - zeros[..., None]) * scales.float()[..., None]).view(weight.shape)
        made = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.t().float(), zeros=zeros.t())
        layer = name.removesuffix(".weight")
        for word in ("qweight", "qzeros", "scales"):
            packed[f"{layer}.{word}"] = getattr(made, word).contiguous()
        whole = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, group)
        expected[layer] = whole.t().double() @ probe(weight.shape[1])
    target.mkdir(parents=True)
    save_file(packed, target / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return expected


def compressed(target: Path, plain: Path, modifier: Callable[[], Any]) -> dict[str, Tensor]:
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    data = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in SAMPLES])
    oneshot(model=model, dataset=data, recipe=modifier(), num_calibration_samples=len(SAMPLES), max_seq_length=32)
    model.save_pretrained(target, save_compressed=True)
    return whole_weights(target) | {"logits": logits(AutoModelForCausalLM.from_pretrained(target))}


def bitsandbytes(target: Path, plain: Path, **settings: Any) -> dict[str, Tensor]:
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    made = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=BitsAndBytesConfig(**settings), device_map="cpu", dtype=torch.float16
    )
    made.save_pretrained(target)
    model, expected = AutoModelForCausalLM.from_pretrained(target, device_map="cpu"), {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(weight, "quant_state", None) is not None:
            state = copy(weight.quant_state)  # as one row: its CPU kernel is wrong for blocks across outputs
            state.shape = torch.Size((1, math.prod(state.shape)))
            whole = dequantize_4bit(weight.data, state).view(weight.quant_state.shape)
        elif getattr(weight, "SCB", None) is not None:
            whole = weight.data.float() * weight.SCB.unsqueeze(1) / 127
        else:
            continue
        expected[name] = whole.double() @ probe(whole.shape[1])
    if model.config.hidden_size % 64:
        return expected  # its product on a CPU does not take blocks across outputs
    return expected | {"logits": logits(model)}


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """By the compressors of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(given)
    scheme = next(iter(config.config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, word = name.rpartition(".")
        layers.setdefault(layer, {})[word] = tensor
    expected = {
        layer: compressor.decompress(tensors, scheme)["weight"].double() @ probe(inputs(tensors))
        for layer, tensors in layers.items()
        if "weight_scale" in tensors
    }
    if scheme.input_activations is not None:
        expected["rounded"] = rounded_sample(scheme.input_activations, layers[QUERY])
    return expected


def rounded_sample(args: Any, layer: dict[str, Tensor]) -> Tensor:
    from compressed_tensors.quantization import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = sample(inputs(layer))
    if args.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(x[None], args, nn.Module())
        return fake_quantize(x[None], scale, zero, args)[0]
    return fake_quantize(x, layer["input_scale"].float(), None, args)


def inputs(tensors: dict[str, Tensor]) -> int:
    return int(tensors["weight_shape"][1]) if "weight_shape" in tensors else tensors["weight"].shape[1]


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].float()


def recipe(scheme: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        from llmcompressor.modifiers.quantization import QuantizationModifier

        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"], **settings)

    return make


def searched(**weights: Any) -> Callable[[], Any]:
    def make() -> Any:
        from llmcompressor.modifiers.quantization import GPTQModifier

        usual = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
        groups = {"group_0": {"targets": ["re:.*_proj$"], "weights": usual | weights}}
        return GPTQModifier(config_groups=groups, ignore=["lm_head"])

    return make


RECIPES: dict[str, Callable[[Path, Path], dict[str, Tensor]]] = {
    "gptq-4bit": lambda target, plain: gptq(target, plain, bits=4, desc_act=False, sym=True),
    "gptq-4bit-act-order": lambda target, plain: gptq(target, plain, bits=4, desc_act=True, sym=True),
    "gptq-4bit-asym-v2": lambda target, plain: gptq(
        target, plain, bits=4, desc_act=False, sym=False, checkpoint_format="gptq_v2"
    ),
    "gptq-8bit": lambda target, plain: gptq(target, plain, bits=8, desc_act=False, sym=True),
    "gptq-3bit": lambda target, plain: gptq(target, plain, bits=3, desc_act=False, sym=True),
    "gptq-2bit": lambda target, plain: gptq(target, plain, bits=2, desc_act=False, sym=True),
    "awq": awq,
    "ct-w4a16": lambda target, plain: compressed(target, plain, searched()),
    "ct-w4a16-asym": lambda target, plain: compressed(target, plain, searched(symmetric=False)),
    "ct-w8a16": lambda target, plain: compressed(target, plain, recipe("W8A16")),
    "ct-w8a8": lambda target, plain: compressed(target, plain, recipe("W8A8")),
    "ct-fp8": lambda target, plain: compressed(target, plain, recipe("FP8")),
    "ct-fp8-dynamic": lambda target, plain: compressed(target, plain, recipe("FP8_DYNAMIC")),
    "ct-fp8-block": lambda target, plain: compressed(target, plain, recipe("FP8_BLOCK")),
    "bnb-nf4": lambda target, plain: bitsandbytes(target, plain, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb-nf4-double": lambda target, plain: bitsandbytes(
        target, plain, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bnb-fp4": lambda target, plain: bitsandbytes(
        target, plain, load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage=torch.bfloat16
    ),
    "bnb-fp4-double": lambda target, plain: bitsandbytes(
        target, plain, load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True
    ),
    "bnb-int8": lambda target, plain: bitsandbytes(target, plain, load_in_8bit=True),
}


# Groups and blocks of 128 inputs need as many; blocks of 64 go across outputs where inputs are no multiple of 64.
HIDDEN = {"ct-w8a16": 128, "ct-fp8-block": 128, "bnb-nf4-double": 96}


def main(names: list[str]) -> None:
    for name in names or list(RECIPES):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "quantized"
            expected = RECIPES[name](target, plain_model(Path(folder) / "plain", hidden=HIDDEN.get(name, 64)))
            shutil.rmtree(FIXTURES / name, ignore_errors=True)
            (FIXTURES / name).mkdir(parents=True)
            for file in KEPT:
                shutil.copy(target / file, FIXTURES / name / file)
            whole = {key: value.float().contiguous() for key, value in expected.items()}
            save_file(whole, FIXTURES / name / "expected.safetensors")
        print(name, sorted(expected))


if __name__ == "__main__":
    main(sys.argv[1:])

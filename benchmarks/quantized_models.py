"""Writes quantized checkpoints of a GGUF model with other tools, for benchmarks.perplexity:
    python -m benchmarks.quantized_models --model FILE.gguf --output FOLDER --text FILE --kind plain,gptq,awq,q4_k_m
    [--group-size 64] [--samples 16] [--window 256] [--skip-tokens 8192] [--llama-library PATH]

`plain`: bfloat16 safetensors, which `gptq` (by the package gptqmodel) and `awq` (by llmcompressor) start from, both of
4 bits. `q4_k_m`: a GGUF file of a tied Llama whose matrices llama.cpp's own `ggml_quantize_chunk` rounds, with the
types that its Q4_K_M gives to each; needs the package gguf and a library that exports the function, as the one of
xllamacpp does. Calibration uses `--samples` windows of the text after its first `--skip-tokens` tokens, on which
perplexity is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

KINDS = ("plain", "gptq", "awq", "q4_k_m")


def write_plain(model: Path, folder: Path) -> None:
    """Write the GGUF file's weights in bfloat16, in the format of transformers' checkpoints."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    from quire.runtime.loading.checkpoint import open_checkpoint
    from quire.runtime.loading.files import files_at

    checkpoint = open_checkpoint(files_at(model))
    folder.mkdir(parents=True)
    tensors = {name: checkpoint.read(name).bfloat16().contiguous() for name in checkpoint.names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(str(model.parent), gguf_file=model.name).to_dict()
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str), encoding="utf-8")
    AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name).save_pretrained(str(folder))


def calibration(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    from quire.runtime.loading.files import files_at
    from quire.serving.text.tokenizer import load_tokenizer

    tokenizer, window = load_tokenizer(files_at(options.model)), options.window
    count = options.skip_tokens + options.samples * window
    tokens = tokenizer.encode(options.text.read_text(encoding="utf-8")[: 16 * count])[options.skip_tokens : count]
    windows = [list(tokens[begin : begin + window]) for begin in range(0, len(tokens), window)]
    return [{"input_ids": each, "attention_mask": [1] * len(each)} for each in windows]


def write_gptq(plain: Path, folder: Path, options: argparse.Namespace) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=options.group_size, device="cpu", desc_act=False, sym=True)
    made = GPTQModel.load(str(plain), config)
    made.quantize(calibration(options), batch_size=1)
    made.save(str(folder))


def write_awq(plain: Path, folder: Path, options: argparse.Namespace) -> None:
    """Write an AWQ checkpoint with zero points, in the format of compressed-tensors."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.cuda.is_available():
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]  # it asks for a GPU
    model = AutoModelForCausalLM.from_pretrained(str(plain), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(plain))
    levels = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=options.group_size)
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=levels)}
    oneshot(
        model=model, processor=tokenizer, dataset=Dataset.from_list(calibration(options)),
        recipe=[AWQModifier(ignore=["lm_head"], config_groups=groups)], max_seq_length=options.window,
        num_calibration_samples=options.samples,
    )  # fmt: skip
    model.save_pretrained(str(folder), save_compressed=True)
    tokenizer.save_pretrained(str(folder))


def write_q4_k_m(model: Path, file: Path, library: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(model)
    architecture = str(reader.fields["general.architecture"].contents())
    layers = int(reader.fields[f"{architecture}.block_count"].contents())
    writer = GGUFWriter(file, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    writer.add_file_type(15)  # mostly Q4_K, medium
    quantize = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    for tensor in reader.tensors:
        numbers = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if numbers.ndim < 2:
            writer.add_tensor(tensor.name, numbers)
            continue
        kind = GGMLQuantizationType[k_m_type(tensor.name, numbers.shape[1], layers)]
        out = np.empty(numbers.nbytes, dtype=np.uint8)
        size = quantize(kind, numbers.ctypes.data, out.ctypes.data, 0, *numbers.shape, None)
        writer.add_tensor(tensor.name, out[:size].reshape(len(numbers), -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def k_m_type(name: str, inputs: int, layers: int) -> str:
    """Return the type that llama.cpp's Q4_K_M gives to a matrix of a Llama with a tied head: Q6_K for the table, and
    for the values and down projections of half of the layers. If the row length is not a multiple of 256, it is the
    next larger type."""
    found = re.fullmatch(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight", name)
    layer, eighth = int(found[1]) if found else 0, layers // 8
    more = found is not None and (layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2)
    is_large = more or name == "token_embd.weight"
    if inputs % 256:
        return "Q8_0" if is_large else "Q5_0"
    return "Q6_K" if is_large else "Q4_K"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file of a Llama")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoints, one for each kind")
    parser.add_argument("--text", type=Path, help="calibrates gptq and awq")
    parser.add_argument("--kind", default="plain", help=f"of {', '.join(KINDS)}; several with commas")
    parser.add_argument("--group-size", type=int, default=64, help="inputs that share a scale, of gptq and awq")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--window", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--skip-tokens", type=int, default=8192, help="tokens of the text that no sample is of")
    parser.add_argument("--llama-library", type=Path, help="a shared library with llama.cpp, for q4_k_m")
    options = parser.parse_args(arguments)
    kinds = options.kind.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"unknown kind {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    if "q4_k_m" in kinds and options.llama_library is None:
        parser.error("q4_k_m needs --llama-library")
    if {"gptq", "awq"} & set(kinds) and options.text is None:
        parser.error("gptq and awq need --text")
    torch.manual_seed(0)
    options.output.mkdir(parents=True, exist_ok=True)
    plain = options.output / "plain"
    for kind in kinds:
        if kind == "q4_k_m":
            write_q4_k_m(options.model, options.output / "q4_k_m.gguf", options.llama_library)
        elif kind == "plain":
            write_plain(options.model, plain)
        else:
            {"gptq": write_gptq, "awq": write_awq}[kind](plain, options.output / kind, options)
        print(f"wrote {kind} to {options.output}", flush=True)


if __name__ == "__main__":
    main()

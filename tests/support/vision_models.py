"""A tiny random model that takes images, as transformers makes it, and images with their prompts for both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from family_bench import randomize
from quire.config.vision import ImageGrid, Vision
from quire.runtime.layers.vision import cut_patches
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.sampling.make import make_sampler
from quire.types.images import PromptImage, image_key
from quire.types.step import Chunk
from tiny_models import DEVICE, Bench, engine_config

IMAGE, START, END = 90, 92, 93  # placeholder, and the tokens around an image
IN_TURN = {  # with pairs that alternate between the axes
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 10_000.0,
    }
}  # fmt: skip
HALF_ROTATED = {  # of every head
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    }
}  # fmt: skip
HALF_IN_SECTIONS = {  # the same, with pairs of an axis side by side
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
    }
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}}
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, **MROPE,
}  # fmt: skip
QWEN3_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
}
SMOL_TOWER: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 24,
}  # fmt: skip
GEMMA4_TOWER: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 2_240, "model_type": "gemma4_vision",
}  # fmt: skip
GEMMA4_TEXT: dict[str, Any] = {
    "head_dim": 16, "global_head_dim": 16, "sliding_window": 9, "rope_parameters": None, "bos_token_id": None,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 0, "pad_token_id": 3,
}  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {  # by family
    "qwen2_5_vl": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "window_size": 24,
        "out_hidden_size": 64, "fullatt_block_indexes": [1],
    },
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 64},
    "qwen3_vl": {**QWEN3_TOWER, "deepstack_visual_indexes": [2, 0]},
    "qwen3_vl_moe": {**QWEN3_TOWER, "deepstack_visual_indexes": [1]},
    "gemma3": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 32, "vision_use_head": False, "model_type": "siglip_vision_model",
    },
    "gemma4": {**GEMMA4_TOWER, "use_clipped_linears": True},
    "gemma4_large": {
        **GEMMA4_TOWER, "standardize": True, "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
    },
    "mistral3": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 64, "hidden_act": "silu", "head_dim": 16, "model_type": "pixtral",
    },
    "llava": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 8,
        "image_size": 64, "hidden_act": "gelu", "head_dim": 16, "model_type": "pixtral",
    },
    "glm4v": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "image_size": 20,
        "out_hidden_size": 64,
    },
    "glm4v_moe": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "image_size": 20,
        "out_hidden_size": 64,
    },
    "smolvlm": SMOL_TOWER,
    "idefics3": SMOL_TOWER,
    "qwen3_5": {**QWEN3_TOWER, "depth": 2},
    "qwen3_5_moe": {**QWEN3_TOWER, "depth": 2},
}  # fmt: skip
TEXTS: dict[str, dict[str, Any]] = {  # what their decoders say besides TEXT
    "qwen3_vl": {"head_dim": 16, **IN_TURN},
    "qwen3_vl_moe": {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, **IN_TURN,
    },
    "gemma3": {
        "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": None,
    },
    "gemma4": {**GEMMA4_TEXT, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "gemma4_large": {
        **GEMMA4_TEXT, "use_bidirectional_attention": "vision", "attention_k_eq_v": True, "global_head_dim": 32,
        "num_global_key_value_heads": 1,
    },
    "mistral3": {"head_dim": 16, "model_type": "mistral", "rope_parameters": None},
    "llava": {"head_dim": 16, "model_type": "mistral", "rope_parameters": None},
    "glm4v": {"head_dim": 16, **HALF_IN_SECTIONS, "pad_token_id": 0},
    "glm4v_moe": {
        "head_dim": 16, **HALF_IN_SECTIONS, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
        "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 1,
    },
    "smolvlm": {"model_type": "llama", "rope_parameters": None},
    "idefics3": {"model_type": "llama", "rope_parameters": None},
    "qwen3_5": {
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        **HALF_ROTATED,
    },
    "qwen3_5_moe": {
        "head_dim": 16, "layer_types": ["full_attention", *["linear_attention"] * 2], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        **HALF_ROTATED,
    },
}  # fmt: skip
TOKENS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": START, "vision_end_token_id": END}
UNIT = 8  # pixels of a token
VISION = Vision(ImageGrid(IMAGE, UNIT), 1, 32, 48, 2, patch=4)  # how its images are cut


SPECIAL = {
    "gemma3": {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 16},
    "mistral3": {"image_token_index": IMAGE, "spatial_merge_size": 2},
    "llava": {"image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "smolvlm": {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
    "idefics3": {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
}


def vision_model(
    folder: Path, family: str = "qwen2_5_vl", seed: int = 0, changes: dict[str, Any] | None = None
) -> torch.nn.Module:
    """A model of random weights, saved in the folder. `changes`: of its decoder's config."""
    import transformers

    text = TEXT | TEXTS.get(family, {}) | (changes or {})
    config = transformers.AutoConfig.for_model(
        family.removesuffix("_large"), text_config=text, vision_config=TOWERS[family], **SPECIAL.get(family, TOKENS)
    )
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for name, value in model.named_buffers():
        if name.endswith(("put_min", "put_max", "std_bias", "std_scale")):  # narrow enough to clip some
            value.fill_({"n": -0.6, "x": 0.9, "s": 0.3, "e": 0.8}[name[-1]])
    randomize(model, seed).save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Picture:
    """Pixels [height, width, 3] of a whole number of tokens."""

    pixels: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        height, width, _ = self.pixels.shape
        return height // UNIT, width // UNIT

    def at(self, start: int, gap: int = 0) -> PromptImage:
        data, shape = self.pixels.numpy().tobytes(), self.shape
        return PromptImage(start, *shape, data, image_key(*shape, data), gap)


def picture(rows: int, columns: int, seed: int = 0) -> Picture:
    generator = torch.Generator().manual_seed(seed)
    return Picture(
        torch.randint(0, 256, (rows * UNIT, columns * UNIT, 3), generator=generator, dtype=torch.int32).byte()
    )


@dataclass(frozen=True)
class VisionPrompt:
    """Token ids with placeholders, and the images they stand for."""

    tokens: list[int]
    images: tuple[PromptImage, ...]
    pictures: tuple[Picture, ...]


def prompt_of(*parts: Picture | Sequence[int], row_ends: tuple[int, ...] = ()) -> VisionPrompt:
    """Texts and pictures in their order. `row_ends`: tokens behind each row and behind the last one, instead of tokens
    around a picture."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, Picture):
            rows, columns = part.shape
            images.append(part.at(len(tokens) + (not row_ends), len(row_ends[:1])))
            if row_ends:
                tokens += ([IMAGE] * columns + [row_ends[0]]) * rows
                tokens[-1] = row_ends[1]
            else:
                tokens += [START, *[IMAGE] * (rows * columns), END]
        else:
            tokens += part
    return VisionPrompt(tokens, tuple(images), tuple(part for part in parts if isinstance(part, Picture)))


@torch.no_grad()
def vision_reference(model: torch.nn.Module, prompt: VisionPrompt, count: int) -> tuple[list[int], Tensor]:
    """transformers' greedy tokens, and the logits they came from [count, vocab]."""
    given: dict[str, Any] = {}
    if prompt.pictures and model.config.model_type == "gemma3":  # type: ignore[union-attr]
        pixels = torch.stack([each.pixels.permute(2, 0, 1).float() for each in prompt.pictures])
        given["pixel_values"] = (pixels / 255 - 0.5) / 0.5
        given["token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in prompt.tokens]])
    elif prompt.pictures and model.config.model_type in ("smolvlm", "idefics3"):  # type: ignore[union-attr]
        given = smolvlm_inputs(prompt.pictures)
    elif prompt.pictures and model.config.model_type in ("mistral3", "llava"):  # type: ignore[union-attr]
        given = pixtral_inputs(prompt.pictures)
    elif prompt.pictures and model.config.model_type == "gemma4":  # type: ignore[union-attr]
        given = gemma4_inputs(prompt.pictures)
        given["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in prompt.tokens]])
    elif prompt.pictures:
        given["pixel_values"] = torch.cat([cut_patches(each.pixels, VISION, torch.float32) for each in prompt.pictures])
        given["image_grid_thw"] = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in shapes(prompt)])
        given["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in prompt.tokens]])
    ids = torch.tensor([prompt.tokens])
    found = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=count, min_new_tokens=count,
        do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return found.sequences[0, len(prompt.tokens) :].tolist(), torch.cat(found.logits)


def pixtral_inputs(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Normalized pixels, padded to the largest picture."""
    mean, std = torch.tensor(VISION.mean), torch.tensor(VISION.std)
    sizes = [each.pixels.shape[:2] for each in pictures]
    values = torch.zeros(len(pictures), 3, *(max(sides) for sides in zip(*sizes, strict=True)))
    for number, (each, (height, width)) in enumerate(zip(pictures, sizes, strict=True)):
        values[number, :, :height, :width] = ((each.pixels.float() / 255 - mean) / std).permute(2, 0, 1)
    return {"pixel_values": values, "image_sizes": torch.tensor(sizes)}


def smolvlm_inputs(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Tiles of one size, as one sample of several images."""
    pixels = torch.stack([each.pixels.permute(2, 0, 1).float() for each in pictures])
    return {"pixel_values": ((pixels / 255 - 0.5) / 0.5)[None]}


def gemma4_inputs(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Patches of 4 x 4 pixels and their columns and rows, padded to those of the largest picture."""
    most = max(4 * rows * columns for rows, columns in (each.shape for each in pictures))
    values, places = torch.zeros(len(pictures), most, 48), torch.full((len(pictures), most, 2), -1)
    for number, each in enumerate(pictures):
        rows, columns = (2 * side for side in each.shape)
        cut = each.pixels.float().div(255).view(rows, 4, columns, 4, 3).transpose(1, 2).reshape(rows * columns, 48)
        down, across = torch.arange(rows * columns) // columns, torch.arange(rows * columns) % columns
        values[number, : len(cut)], places[number, : len(cut)] = cut, torch.stack((across, down), dim=1)
    return {"pixel_values": values, "image_position_ids": places}


def shapes(prompt: VisionPrompt) -> list[tuple[int, int]]:
    return [each.shape for each in prompt.pictures]


def check_logits(
    bench: Bench, prompts: Sequence[VisionPrompt], expected: Sequence[tuple[list[int], Tensor]], cut: int
) -> None:
    """Run the prompts in one crowd, the first in two chunks if `cut` is not 0, and compare with `vision_reference`."""
    for row, prompt in enumerate(prompts):
        bench.add(row, prompt.tokens, images=prompt.images)
    if cut:
        bench.run(chunks=[Chunk(0, 0, cut)])
    begins = [cut, *(0 for _ in prompts[1:])]
    bench.run(chunks=[Chunk(row, begin, len(prompts[row].tokens) - begin, (row,)) for row, begin in enumerate(begins)])
    for _ in range(len(expected[0][0]) - 1):
        bench.run(decode=list(range(len(prompts))))
    for row, (tokens, logits) in enumerate(expected):
        assert bench.tokens[row][len(prompts[row].tokens) :] == tokens
        torch.testing.assert_close(torch.stack(bench.sampler.seen[row]), logits, rtol=1e-3, atol=2e-4)
    bench.worker.check()


def check_in_triton(folder: Path, prompt: VisionPrompt, expected: tuple[list[int], Tensor]) -> None:
    """Compare the first two tokens that the kernels of a GPU choose with `vision_reference`."""
    sampler = make_sampler(2, TEXT["vocab_size"], torch.device(DEVICE), "triton", 64)
    config = engine_config(rows=2, max_len=40)
    bench = Bench(open_checkpoint(files_at(folder)), config, attention="triton", sampler=sampler)
    bench.add(0, prompt.tokens, images=prompt.images)
    bench.run(chunks=[Chunk(0, 0, len(prompt.tokens), (0,))])
    bench.run(decode=[0])
    assert bench.tokens[0][len(prompt.tokens) :] == expected[0][:2]


def write_changed(folder: Path, into: Path, where: str, value: object) -> None:
    """Write the config.json of `folder` into another one, with one field changed. where: "field" or "part.field"."""
    config = json.loads((folder / "config.json").read_text())
    *outer, key = where.split(".")
    (config[outer[0]] if outer else config)[key] = value
    (into / "config.json").write_text(json.dumps(config))

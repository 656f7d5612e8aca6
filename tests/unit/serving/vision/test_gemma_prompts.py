"""Gemma and Mistral 3 offline: the chat template writes one token for an image, the prompt has the whole sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tiny_served import _write_tokenizer

Image = pytest.importorskip("PIL.Image")
SPECIAL = ("<end>", "<start_of_image>", "<image_soft_token>", "<end_of_image>")
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
SETTINGS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "num_kv_blocks": 64}


def write_model(folder: Path) -> Path:
    backend = _write_tokenizer(folder, *SPECIAL)
    text = {
        "vocab_size": backend.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "sliding_window": 16,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 16, "vision_use_head": False,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "vision_config": vision, "mm_tokens_per_image": 4, "torch_dtype": "float32",
        "image_token_index": backend.token_to_id("<image_soft_token>"),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_chat_and_generate_give_an_image_the_same_tokens(tmp_path: Path) -> None:
    image, greedy = Image.new("RGB", (40, 24), (200, 10, 10)), SamplingParams(temperature=0.0, max_tokens=4)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "what?"}]
    with LLM(write_model(tmp_path), **SETTINGS) as made:
        (chat,) = made.chat([{"role": "user", "content": parts}], greedy)
        given: Any = {"prompt": "<start_of_image>what?", "multi_modal_data": {"image": image}}
        (plain,) = made.generate(given, greedy)
        placeholders = "<image_soft_token>" * 4
        wanted = made.tokenizer.encode(f"\n\n<start_of_image>{placeholders}<end_of_image>\n\nwhat?", False)
    assert list(plain.prompt_token_ids or ()) == list(chat.prompt_token_ids or ()) == list(wanted)
    assert plain.outputs[0].token_ids == chat.outputs[0].token_ids


SPECIAL4 = ("<end>", "<|image|>", "<|image>", "<image|>")


def write_gemma4(folder: Path) -> Path:
    backend = _write_tokenizer(folder, *SPECIAL4)
    size = backend.get_vocab_size()
    text = {
        "vocab_size": size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
        "max_position_embeddings": 512, "sliding_window": 16, "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": size,
    }  # fmt: skip
    vision = {
        "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text,
        "vision_config": vision, "torch_dtype": "float32", "image_token_id": backend.token_to_id("<|image|>"),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    prepared = {"image_processor": {"max_soft_tokens": 70, "do_normalize": False, "patch_size": 4}}
    prepared["image_processor"]["pooling_kernel_size"] = 2
    (folder / "processor_config.json").write_text(json.dumps(prepared))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE.replace("<start_of_image>", "<|image|>")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_gemma_4_gives_an_image_as_many_tokens_as_its_shape_allows(tmp_path: Path) -> None:
    image, greedy = Image.new("RGB", (40, 24), (200, 10, 10)), SamplingParams(temperature=0.0, max_tokens=4)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "what?"}]
    with LLM(write_gemma4(tmp_path), **SETTINGS) as made:
        (chat,) = made.chat([{"role": "user", "content": parts}], greedy)
        given: Any = {"prompt": "<|image|>what?", "multi_modal_data": {"image": image}}
        (plain,) = made.generate(given, greedy)
        wanted = made.tokenizer.encode(f"<|image>{'<|image|>' * 60}<image|>what?", False)  # 6 rows of 10
    assert list(plain.prompt_token_ids or ()) == list(chat.prompt_token_ids or ()) == list(wanted)
    assert plain.outputs[0].token_ids == chat.outputs[0].token_ids


def write_mistral3(folder: Path) -> Path:
    names = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    backend = _write_tokenizer(folder, "<end>", *names)
    text = {
        "model_type": "mistral", "vocab_size": backend.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 512,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 32,
    }  # fmt: skip
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text,
        "vision_config": vision, "torch_dtype": "float32", "image_token_index": backend.token_to_id("[IMG]"),
        "spatial_merge_size": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE.replace("<start_of_image>", "[IMG]")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_rows_of_an_image_end_as_mistral_3_expects(tmp_path: Path) -> None:
    image, greedy = Image.new("RGB", (40, 24), (200, 10, 10)), SamplingParams(temperature=0.0, max_tokens=4)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "what?"}]
    with LLM(write_mistral3(tmp_path), **SETTINGS) as made:
        (chat,) = made.chat([{"role": "user", "content": parts}], greedy)
        given: Any = {"prompt": "[IMG]what?", "multi_modal_data": {"image": image}}
        (plain,) = made.generate(given, greedy)
        rows = f"{'[IMG]' * 4}[IMG_BREAK]" * 2 + f"{'[IMG]' * 4}[IMG_END]"  # 32 x 19 pixels are 3 rows of 4
        wanted = made.tokenizer.encode(f"{rows}what?", False)
    assert list(plain.prompt_token_ids or ()) == list(chat.prompt_token_ids or ()) == list(wanted)
    assert plain.outputs[0].token_ids == chat.outputs[0].token_ids

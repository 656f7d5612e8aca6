"""A model directory that `quire serve --load-format dummy` starts in seconds: random weights, one token per byte."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_END, _START, _STOP = "<|end|>", "<|start|>", "<|stop|>"
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_VISION_TEMPLATE = (  # of the form that Qwen2.5-VL has
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FLAGS = ("--load-format", "dummy", "--dtype", "float32", "--threads", "1")


def write_tiny_model(folder: Path, *, max_length: int = 2_048) -> Path:
    """Write the files and return the folder. Any token may be sampled, so answers hold broken characters."""
    backend = _write_tokenizer(folder, _END, _START, _STOP)
    end = backend.token_to_id(_END)
    _write(folder / "tokenizer_config.json", {"eos_token": _END, "chat_template": _TEMPLATE})
    _write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": backend.get_vocab_size(),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": max_length,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "eos_token_id": end,
            "torch_dtype": "float32",
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        },
    )
    return folder


def write_tiny_vision_model(folder: Path) -> Path:
    """The same for a model that takes images: a token stands for 8 x 8 pixels, an image has 4 to 64 tokens."""
    backend = _write_tokenizer(folder, _END, _START, _STOP, *_VISION)
    _write(folder / "tokenizer_config.json", {"eos_token": _END, "chat_template": _VISION_TEMPLATE})
    tower = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "window_size": 16,
        "out_hidden_size": 32, "fullatt_block_indexes": [1],
    }  # fmt: skip
    numbers = {
        "vocab_size": backend.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": backend.token_to_id(_END),
    }  # fmt: skip
    kind = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    tokens = {"image_token_id": backend.token_to_id("<|image_pad|>")}
    _write(folder / "config.json", {**kind, **numbers, **tokens, "vision_config": tower})
    sizes = {"patch_size": 4, "merge_size": 2, "min_pixels": 4 * 64, "max_pixels": 64 * 64}
    _write(folder / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor", **sizes})
    return folder


def _write_tokenizer(folder: Path, *special: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return backend


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")

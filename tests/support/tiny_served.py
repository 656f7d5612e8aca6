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
FLAGS = ("--load-format", "dummy", "--dtype", "float32", "--threads", "1")


def write_tiny_model(folder: Path, *, max_length: int = 2_048) -> Path:
    """Write the files and return the folder. Any token may be sampled, so answers hold broken characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (_END, _START, _STOP)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
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


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")

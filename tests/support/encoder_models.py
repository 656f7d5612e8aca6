"""A tiny random model of every family of encoders, as transformers makes and saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from family_bench import randomize
from quire.config.embedding import EncoderConfig
from quire.config.engine import DeviceConfig
from quire.runtime.encoder.encoder import TextEncoder
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.sentence import read_embedding_settings
from quire.runtime.loading.model_config import read_model_config
from tiny_models import DEVICE

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
COMMON = SIZES | {"type_vocab_size": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": COMMON,
    "roberta": COMMON | {"pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": COMMON | {"pad_token_id": 1, "layer_norm_eps": 1e-5},
    "distilbert": {
        "vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64,
    },
    "modernbert": SIZES | {
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        "local_attention": 8, "num_hidden_layers": 4,
    },
    "embedding_gemma": SIZES | {
        "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8,
        "num_hidden_layers": 4, "sliding_window_pattern": 3, "use_bidirectional_attention": True,
    },
    "nomic_bert": COMMON,
    "jina_embeddings_v3": COMMON | {"type_vocab_size": 1},
    "camembert": COMMON | {"pad_token_id": 1},
    "electra": COMMON | {"embedding_size": 32},
    "albert": COMMON | {"embedding_size": 32},
    "mpnet": SIZES,
}  # fmt: skip
NO_HEADS = ("embedding_gemma",)  # families without classifiers, and without masked language models
HF_NAMES = {"embedding_gemma": "gemma3_text"}  # `model_type`, where it differs
TEXTS = ([5, 9, 2, 11, 7, 3, 8, 4, 30, 12], [40, 4, 17], [6], [55, 8, 20], list(range(10, 60)))


def hf_encoder(family: str, **changes: Any) -> torch.nn.Module:
    """A model of random weights, norms and biases too."""
    import transformers

    config = transformers.AutoConfig.for_model(HF_NAMES.get(family, family), **(CONFIGS[family] | changes))
    config._attn_implementation = "eager"
    return randomize(transformers.AutoModel.from_config(config, dtype=torch.float32).eval())


def hf_classifier(family: str, num_labels: int, **changes: Any) -> torch.nn.Module:
    """The same with a head."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **(CONFIGS[family] | {"num_labels": num_labels} | changes))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    return randomize(model.eval())


def expected_states(model: torch.nn.Module, text: list[int]) -> Tensor:  # [tokens, hidden]
    with torch.no_grad():
        return model(input_ids=torch.tensor([text])).last_hidden_state[0]  # type: ignore[no-any-return]


def load_encoder(path: Path, *, dtype: Any = "float32", max_tokens: int = 200, kernels: str = "auto") -> TextEncoder:
    """`kernels`: those of the attention backend of this name. On the device that tests run on."""
    files = files_at(path)
    model = read_model_config(files)
    where = DeviceConfig(device=DEVICE, dtype=dtype, kv_dtype=dtype, attention_backend=kernels)
    return TextEncoder(files, model, EncoderConfig(where, model.rope.max_position, 64, max_tokens))


def load_classifier(path: Path) -> TextEncoder:
    files = files_at(path)
    model = read_model_config(files)
    where = DeviceConfig(device=DEVICE, dtype="float32", kv_dtype="float32", attention_backend="auto")
    config = EncoderConfig(where, model.rope.max_position, 64, 64)
    return TextEncoder(files, model, config, read_embedding_settings(files))


def hidden_states(encoder: TextEncoder, texts: Any) -> list[Tensor]:
    """Those of each text, in order."""
    found: dict[int, Tensor] = {}

    def keep(hidden: Tensor, lengths: Tensor) -> Tensor:
        kept.extend(hidden.float().cpu().split(lengths.tolist()))
        return lengths

    kept: list[Tensor] = []
    numbers = [number for batch, _ in encoder.run(texts, keep) for number in batch]
    found.update(zip(numbers, kept, strict=True))
    return [found[number] for number in range(len(texts))]

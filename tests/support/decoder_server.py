"""A TestServer whose engine is loaded from a folder as `quire serve` loads it, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from http_server import MODEL, TestServer
from quire.config.arguments import EngineArguments
from quire.config.server import ModelSource, ServerConfig
from quire.engine.core import EngineCore
from quire.serving.process.control import EngineStart
from quire.serving.process.engine_process import load_engine
from quire.serving.process.link import EngineReady
from tests.unit.serving.scripted import TOKENIZER, VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_decoder(folder: Path, kind: str, **fields: Any) -> Any:
    """Save a tiny random model of a class of transformers, such as Qwen3ForCausalLM, and return it."""
    torch.manual_seed(0)
    family = kind.partition("For")[0].removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(**SIZES, **fields)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    TOKENIZER.save(folder / "tokenizer.json")
    return model


def save_pooling(folder: Path, mode: str) -> None:
    """Write the files of sentence-transformers: a pooling, and that embeddings are normalized."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


class DecoderServer(TestServer):
    """`settings` are those of the engine."""

    def __init__(self, folder: Path, *, options: dict[str, Any] | None = None, **settings: Any) -> None:
        usual = {"device": "cpu", "dtype": "float32", "threads": 1, "num_kv_blocks": 256, "max_model_len": 256}
        self._arguments = EngineArguments(**(usual | settings))
        self._folder = folder
        self.core: EngineCore | None = None
        super().__init__(lambda prompt, index: "", **(options or {}))

    def _make_core(self) -> tuple[EngineCore, EngineReady]:
        source = ModelSource(model=str(self._folder), served_names=(MODEL,))
        config = ServerConfig(source=source, engine=self._arguments)
        start = EngineStart(config, next(self._generations), "", "")
        core, ready = load_engine(start, lambda *_: None)
        assert isinstance(core, EngineCore)
        self.core = core
        return core, ready

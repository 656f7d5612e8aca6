"""The served model in the format of Ollama's API."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.gguf.reader import GgufFile
from quire.runtime.loading.gguf.shards import shard_paths
from quire.runtime.loading.resolve import resolve_model
from quire.serving.http.endpoints.ollama_format import timestamp
from quire.serving.http.schemas import TEXT, WHOLE, Schema, many, record
from quire.serving.http.service import Service
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest, QuireError

logger = logging.getLogger("quire.edge")

LATEST = ":latest"
NEVER = "2318-01-01T00:00:00Z"  # the `expires_at` by which Ollama means "never"
_PARAMETERS = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}  # Ollama's names


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the model's files: format, size, modification time in seconds since the epoch, and type of a GGUF
    file's weights."""

    kind: str
    num_bytes: int
    written_at: float
    weight_type: str = ""  # "Q4_K"; "" for safetensors


@lru_cache(maxsize=4)
def read_facts(model: str) -> Facts | None:
    """Return the facts about a model's files, or None if they cannot be read. Cached: the files do not change while a
    server runs."""
    try:
        files = resolve_model(model, offline=True)
        statuses = [path.stat() for path in _weight_files(files)]
        weight_type = _weight_type(files) if files.kind == "gguf" else ""
    except (QuireError, OSError) as error:
        logger.warning("the model's files cannot be described: %s", error)
        return None
    kind = "gguf" if files.kind == "gguf" else "safetensors"
    written_at = max((status.st_mtime for status in statuses), default=0.0)
    return Facts(kind, sum(status.st_size for status in statuses), written_at, weight_type)


def _weight_type(files: ModelFiles) -> str:
    """Return the type in which most weights of a GGUF file are stored. Only its first part is read."""
    file = GgufFile(files.path)
    try:
        sizes: Counter[str] = Counter()
        for tensor in file.tensors.values():
            sizes[tensor.ggml_type.name] += math.prod(tensor.shape)
    finally:
        file.close()
    return sizes.most_common(1)[0][0] if sizes else ""


class ModelCard:
    """Describes the model under each of its names. Reads files, so use it in a text thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._facts = read_facts(service.config.source.model)

    def listed(self, adapters: Sequence[AdapterInfo] = ()) -> list[dict[str, Any]]:
        """Return the entries of /api/tags. LoRA adapters have the model as their parent."""
        names = self._service.names
        return [*map(self._entry, names), *(self._adapter(info) for info in adapters if info.name not in names)]

    def running(self, adapters: Sequence[AdapterInfo] = ()) -> list[dict[str, Any]]:
        """Return the entries of /api/ps. The model and its adapters are always loaded."""
        engine = self._service.engine()
        more = {"expires_at": NEVER, "context_length": engine.max_model_len}
        entries = [
            entry | more | {"size_vram": 0 if engine.device == "cpu" else entry["size"]}
            for entry in self.listed(adapters)
        ]
        return [{key: value for key, value in entry.items() if key != "modified_at"} for entry in entries]

    def shown(self, name: str) -> dict[str, Any]:
        """Return the body of /api/show."""
        service = self._service
        given = service.texts.sampling_defaults.given()
        lines = [f"{_PARAMETERS.get(key, key):<30} {value}" for key, value in sorted(given.items())]
        return {
            "modelfile": f"FROM {name}\n",
            "parameters": "\n".join(lines),
            "template": service.config.source.chat_template or service.texts.tokenizer.chat_template or "",
            "details": self._details(),
            "model_info": self._sizes(),
            "capabilities": self._capabilities(),
            "modified_at": self._modified_at,
        }

    # --------------------------------------------------------------------------------------------------- internals
    @property
    def _num_bytes(self) -> int:
        return 0 if self._facts is None else self._facts.num_bytes

    @property
    def _modified_at(self) -> str:
        return timestamp(self._service.created if self._facts is None else self._facts.written_at)

    def _adapter(self, info: AdapterInfo) -> dict[str, Any]:
        entry = self._entry(info.name)
        details = entry["details"] | {"parent_model": self._service.names[0], "format": "safetensors"}
        return entry | {"size": info.num_bytes, "digest": info.digest, "details": details}

    def _entry(self, name: str) -> dict[str, Any]:
        tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
        facts = f"{self._service.config.source.model}\0{self._num_bytes}\0{self._modified_at}"
        return {
            "name": tagged,
            "model": tagged,
            "modified_at": self._modified_at,
            "size": self._num_bytes,
            "digest": hashlib.sha256(facts.encode()).hexdigest(),  # identifies the files without reading them whole
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        engine = self._service.engine()
        family = engine.model.architecture
        return {
            "parent_model": "",
            "format": "" if self._facts is None else self._facts.kind,
            "family": family,
            "families": [family] if family else [],
            "parameter_size": _rounded(engine.model.parameters) if engine.model.parameters else "",
            "quantization_level": (self._facts.weight_type if self._facts is not None else "") or engine.dtype,
        }

    def _sizes(self) -> dict[str, Any]:
        """Return the sizes of the model by their names in GGUF files, which clients look up. The context length is the
        server's max_model_len."""
        engine = self._service.engine()
        model, family = engine.model, engine.model.architecture or "unknown"
        return {
            "general.architecture": family,
            "general.parameter_count": model.parameters,
            f"{family}.context_length": engine.max_model_len,
            f"{family}.embedding_length": model.hidden,
            f"{family}.block_count": model.layers,
            f"{family}.feed_forward_length": model.intermediate,
            f"{family}.attention.head_count": model.query_heads,
            f"{family}.attention.head_count_kv": model.kv_heads,
            f"{family}.vocab_size": engine.vocab_size,
        }

    def _capabilities(self) -> list[str]:
        texts = self._service.texts
        if self._service.engine().pooling is not None:
            return ["embedding"]
        try:
            calls = texts.tool_format is not None
        except InvalidRequest:  # the model has no chat template
            return ["completion"]
        more = {"tools": calls, "thinking": texts.reasoning_format is not None}
        return ["completion", *(name for name, has in more.items() if has)]


def _weight_files(files: ModelFiles) -> list[Any]:
    return shard_paths(files.path) if files.kind == "gguf" else sorted(files.path.glob("*.safetensors"))


def _rounded(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


_DETAILS = record(
    {
        "parent_model": TEXT,
        "format": TEXT,
        "family": TEXT,
        "families": many(TEXT),
        "parameter_size": TEXT,
        "quantization_level": TEXT,
    }
)
_ENTRY: dict[str, Schema] = {"name": TEXT, "model": TEXT, "size": WHOLE, "digest": TEXT, "details": _DETAILS}
MODEL_SCHEMAS: dict[str, Schema] = {
    "OllamaModels": record({"models": many(record({**_ENTRY, "modified_at": TEXT}))}),
    "OllamaRunning": record(
        {"models": many(record({**_ENTRY, "expires_at": TEXT, "size_vram": WHOLE, "context_length": WHOLE}))}
    ),
    "OllamaShow": record(
        {
            "modelfile": TEXT,
            "parameters": TEXT,
            "template": TEXT,
            "details": _DETAILS,
            "model_info": {"type": "object"},
            "capabilities": many(TEXT),
            "modified_at": TEXT,
        },
        {"warnings": many(TEXT)},
    ),
    "OllamaPull": record({"status": {"const": "success"}}, {"warnings": many(TEXT)}),
    "OllamaVersion": record({"version": TEXT, "quire": TEXT}),
}

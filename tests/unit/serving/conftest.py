"""An LLM whose model is a script, for tests of what stands above the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.config.model import Heads, ModelConfig, Rope
from quire.serving import assembly as assembly_module
from quire.serving import loading as loading_module
from quire.serving.llm import LLM
from quire.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from tests.unit.serving.scripted import TOKENIZER, VOCAB, Script, ScriptedExecutor

TINY = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    heads=Heads(2, 1, 4),
    rope=Rope(max_position=256),
    norm_eps=1e-5,
)
MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """make_llm(script, fails=..., defaults=..., **LLM arguments) -> LLM; its executor is `llm.executor`."""

    def make(
        script: Script,
        *,
        fails: frozenset[str] = frozenset(),
        defaults: SamplingDefaults = NO_DEFAULTS,
        **arguments: object,
    ) -> LLM:
        executor = ScriptedExecutor(script, fails=fails)
        files = SimpleNamespace(name="scripted", path=Path("scripted.gguf"), kind="gguf")
        monkeypatch.setattr(loading_module, "resolve_model", lambda model, **options: files)
        monkeypatch.setattr(assembly_module, "read_model_config", lambda files: TINY)
        monkeypatch.setattr(loading_module, "load_tokenizer", lambda files: TOKENIZER)
        monkeypatch.setattr(loading_module, "read_sampling_defaults", lambda *args: defaults)
        monkeypatch.setattr(assembly_module, "SingleExecutor", lambda *args, **kwargs: executor)
        monkeypatch.setattr(assembly_module, "cache_namespace", lambda *args: "")
        llm = LLM(**{"device": "cpu", **arguments})  # type: ignore[arg-type]
        llm.executor = executor  # type: ignore[attr-defined]
        return llm

    return make

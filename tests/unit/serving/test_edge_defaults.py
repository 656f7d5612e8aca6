"""An edge takes the default sampling from the model it serves, as the server's configuration says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config.server import ModelSource
from quire.runtime.loading.files import ModelFiles
from quire.serving import edge
from tests.unit.serving.scripted import TOKENIZER


def test_the_servers_configuration_decides_the_default_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    files = ModelFiles("m", tmp_path, "hf")
    monkeypatch.setattr(edge, "resolve_model", lambda model, **options: files)
    monkeypatch.setattr(edge, "load_tokenizer", lambda files: TOKENIZER)

    def defaults(**options: object) -> dict[str, object]:
        texts = edge._load_texts(ModelSource(model="m", **options))  # type: ignore[arg-type]
        texts.checker.close()
        return texts.sampling_defaults.given()

    assert defaults() == {"temperature": 0.6, "top_k": 20}
    assert defaults(generation_config="none") == {}
    assert defaults(override_generation_config={"top_k": 5}) == {"temperature": 0.6, "top_k": 5}

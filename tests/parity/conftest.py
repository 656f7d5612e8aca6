from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gguf_to_hf import gguf_to_hf
from quire.runtime.loading.resolve import ModelFiles, resolve_model
from quire.types.errors import QuireError


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """The default model, as `quire pull` left it."""
    try:
        return resolve_model(None)
    except QuireError as error:
        pytest.skip(f"the default model is not here: {error}")


@pytest.fixture(scope="session")
def smollm2_hf(smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face directory, in float32, with a tokenizer.json of the GGUF's vocabulary."""
    from quire.serving.text.tokenizer import load_tokenizer

    directory = gguf_to_hf(smollm2.path, tmp_path_factory.mktemp("smollm2"))
    load_tokenizer(smollm2).save(directory / "tokenizer.json")
    return directory


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bfloat16."""
    from quire.serving.text.tokenizer import load_tokenizer

    directory = gguf_to_hf(smollm2.path, tmp_path_factory.mktemp("smollm2-bf16"), dtype=torch.bfloat16)
    load_tokenizer(smollm2).save(directory / "tokenizer.json")
    return directory

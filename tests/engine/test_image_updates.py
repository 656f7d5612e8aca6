"""An image that was seen before an update of the vision tower is encoded again by the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from quire import LLM
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from vision_models import picture, prompt_of, vision_model

PROMPT = prompt_of([5, 9, 11], picture(3, 5), [7, 30, 8])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def answer(llm: LLM, name: str) -> list[int]:
    client = llm._client
    client.submit(Submit(name, tuple(PROMPT.tokens), GREEDY, TokenRules(), images=PROMPT.images))  # type: ignore[arg-type]
    while not (finished := client.receive().finished):
        pass
    assert finished[0].error is None
    return list(finished[0].samples[0].token_ids)


def engine(folder: Path) -> LLM:
    return LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=128, num_kv_blocks=64
    )


def test_new_weights_of_the_vision_tower_encode_known_images_again(tmp_path: Path) -> None:
    vision_model(tmp_path / "old")
    model = vision_model(tmp_path / "new")
    noise = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.3)
    model.save_pretrained(tmp_path / "new")  # type: ignore[operator]
    with engine(tmp_path / "new") as fresh:
        wanted = answer(fresh, "fresh")
    with engine(tmp_path / "old") as llm:
        assert answer(llm, "before") != wanted
        llm.update_weights_from_disk(tmp_path / "new")
        assert answer(llm, "after") == wanted

"""What is of Qwen3-VL and Qwen3.5 alone: alternating axes, experts stored either way, towers that are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import load_bench
from quire import LLM, SamplingParams
from quire.runtime.layers.rotary import _axes_of_pairs
from quire.runtime.loading.hf.config import hf_model_config
from quire.types.errors import ModelLoadError
from quire.types.step import Chunk
from vision_models import picture, prompt_of, vision_model, vision_reference

pytest.importorskip("transformers")
PROMPT = prompt_of([5, 9], picture(2, 3), [7])
COUNT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_vl")
    vision_model(path, "qwen3_vl")
    return path


def changed(folder: Path, into: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (into / "config.json").write_text(json.dumps(config))
    return into


@pytest.mark.parametrize("sections", [[24, 20, 20], [11, 11, 10], [4, 2, 2]])
def test_pairs_alternate_between_the_axes_as_in_transformers(folder: Path, tmp_path: Path, sections: list[int]) -> None:
    def change(config: dict[str, Any]) -> None:
        config["text_config"]["head_dim"] = 2 * sum(sections)
        config["text_config"]["rope_parameters"]["mrope_section"] = sections

    found = _axes_of_pairs(hf_model_config(changed(folder, tmp_path, change)).rope.sections)
    wanted = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        wanted[axis : 3 * sections[axis] : 3] = axis
    assert found.tolist() == wanted.tolist()


def test_experts_are_read_whichever_way_their_matrices_lie(tmp_path: Path) -> None:
    """Published checkpoints have the inputs before the outputs, transformers 5 saves them behind."""
    model = vision_model(tmp_path, "qwen3_vl_moe")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    stacked = [name for name in stored if re.search(r"experts\.(gate_up|down)_proj$", name)]
    assert stacked
    answers = []
    for _ in range(2):
        bench = load_bench(tmp_path)
        bench.add(0, PROMPT.tokens, images=PROMPT.images)
        bench.run(chunks=[Chunk(0, 0, len(PROMPT.tokens), (0,))])
        answers.append(bench.sampler.seen[0][0])
        stored |= {name: stored[name].transpose(1, 2).contiguous() for name in stacked}
        save_file(stored, file)
    assert torch.equal(*answers)
    torch.testing.assert_close(answers[0], vision_reference(model, PROMPT, 1)[1][0], rtol=1e-3, atol=2e-4)


def test_a_chunk_of_one_image_token_adds_its_deep_features(folder: Path) -> None:
    benches = [load_bench(folder), load_bench(folder)]
    count = len(PROMPT.tokens)
    for bench, starts in zip(benches, (range(count), (0,)), strict=True):
        bench.add(0, PROMPT.tokens, images=PROMPT.images)
        for start in starts:
            end = start + 1 if len(starts) > 1 else count
            bench.run(chunks=[Chunk(0, start, end - start, (0,) if end == count else ())])
    torch.testing.assert_close(*(bench.sampler.seen[0][0] for bench in benches), rtol=1e-4, atol=1e-4)


def test_a_model_for_images_can_be_loaded_for_text_only(tmp_path: Path) -> None:
    text = prompt_of([5, 9, 11, 7])
    wanted = vision_reference(vision_model(tmp_path, "qwen3_5"), text, COUNT)[0]
    settings: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_kv_blocks": 64, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    for limit in (0, 1):
        with LLM(tmp_path, limit_mm_per_prompt={"image": limit}, **settings) as made:
            (output,) = made.generate({"prompt_token_ids": text.tokens}, params)
            assert list(output.outputs[0].token_ids) == wanted


def test_a_tower_that_the_config_does_not_describe_is_not_read(tmp_path: Path) -> None:
    model = vision_model(tmp_path, "qwen3_5")
    changed(tmp_path, tmp_path, lambda config: config.pop("vision_config"))
    bench = load_bench(tmp_path)
    assert bench.worker._runner._model.tower is None
    bench.add(0, [5, 9, 11, 7])
    bench.run(chunks=[Chunk(0, 0, 4, (0,))])
    wanted = vision_reference(model, prompt_of([5, 9, 11, 7]), 1)[1][0]
    torch.testing.assert_close(bench.sampler.seen[0][0], wanted, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("num_position_embeddings", 26, "num_position_embeddings: must be a square number"),
        ("deepstack_visual_indexes", [0, 3], "deepstack_visual_indexes: must name blocks below 3, each once"),
        ("deepstack_visual_indexes", [1, 1], "deepstack_visual_indexes: must name blocks below 3, each once"),
        ("deepstack_visual_indexes", [0, 1, 2], "deepstack_visual_indexes: are 3 blocks"),
        ("out_hidden_size", 32, "out_hidden_size: is 32, and the decoder's hidden_size 64"),
        ("hidden_act", "silu", "hidden_act: 'silu' is not supported"),
        ("rope_parameters", {"rope_type": "axial", "rope_theta": 5e5}, "rope_theta: must be 10000"),
    ],
)
def test_what_the_tower_does_not_do_is_refused_by_name(
    folder: Path, tmp_path: Path, where: str, value: object, error: str
) -> None:
    path = changed(folder, tmp_path, lambda config: config["vision_config"].update({where: value}))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(path)


@pytest.mark.parametrize(
    ("rope", "error"),
    [
        ({"mrope_interleaved": False}, "mrope_interleaved: only true is supported"),
        ({"mrope_section": [2, 3, 3]}, "mrope_section: [2, 3, 3] pairs cannot alternate"),
        ({"mrope_section": [8, 4, 4]}, "mrope_section: has 16 pairs, and a head 8"),
    ],
)
def test_axes_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, rope: dict[str, Any], error: str) -> None:
    path = changed(folder, tmp_path, lambda config: config["text_config"]["rope_parameters"].update(rope))
    with pytest.raises(ModelLoadError, match=re.escape(error)):
        hf_model_config(path)

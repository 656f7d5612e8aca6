"""The floors of models with windows and with experts, held against sums by hand and against the engine's own counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import floor
from benchmarks.gpu.models import FULL, MODELS, SLIDING, BenchModel
from benchmarks.gpu.workloads import Workload
from quire import LLM, SamplingParams
from quire.config.arguments import CACHE_DTYPES
from quire.runtime.loading.hf.config import hf_model_config


def changed(name: str, **values: object) -> BenchModel:
    return replace(MODELS[name], config=MODELS[name].config | values)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_has_as_many_layers_of_each_window(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(MODELS[name].config)
    )  # without the weights that some are stored with
    read = hf_model_config(tmp_path)
    windows = read.windows or (None,) * read.num_layers
    assert MODELS[name].windows == {window: windows.count(window) for window in windows}


def test_windows_are_those_of_the_published_models() -> None:
    assert MODELS["gemma-3-4b"].windows == {1024: 29, None: 5}
    assert MODELS["gpt-oss-20b"].windows == {128: 12, None: 12}
    assert MODELS["llama-3.1-8b"].windows == {None: 32}


def test_a_step_reads_no_more_than_the_window_in_layers_that_have_one() -> None:
    model = MODELS["gpt-oss-20b"]
    alone = floor.step_seconds(model, 1, 0)
    per_layer = 2 * 8 * 64 * 2 / floor.BANDWIDTH  # keys and values of a token, two bytes each
    for length in (100, 128, 129, 10_000):
        seen = 12 * length + 12 * min(length, 128)
        assert floor.step_seconds(model, 1, length) - alone == pytest.approx(seen * per_layer)


def test_a_float8_cache_halves_what_windows_read_too() -> None:
    model, length = MODELS["gemma-3-4b"], 30_000
    alone = floor.step_seconds(model, 1, 0)
    read = floor.step_seconds(model, 1, length) - alone
    small = floor.step_seconds(model, 1, length, floor.Precision(2, 1)) - alone
    assert small == pytest.approx(read / 2)


def test_every_sequence_of_a_step_has_its_own_window() -> None:
    model = changed("gpt-oss-20b", num_hidden_layers=2, layer_types=[SLIDING, FULL], sliding_window=4)
    work = Workload([[1] * 2, [1] * 9], [3, 3])
    steps = floor.decode_seconds(model, work) - 2 * floor.step_seconds(model, 2, 0)
    tokens = (3 + 10) + (3 + 4) + (4 + 11) + (4 + 4)  # of both layers, in both steps
    assert steps == pytest.approx(tokens * 2 * 8 * 64 * 2 / floor.BANDWIDTH)


@pytest.mark.parametrize("length", [100, 1024, 5_000])
def test_prompts_attend_to_no_more_than_the_window(length: int) -> None:
    model = MODELS["gemma-3-4b"]
    pairs = 5 * sum(range(1, length + 1)) + 29 * sum(min(place, 1024) for place in range(1, length + 1))
    work = Workload([[1] * length], [1])
    products = 2 * (model.layer_parameters * length + model.head_parameters)
    attention = floor.prefill_seconds(model, work) * floor.BF16_RATE - products
    assert attention == pytest.approx(4 * 8 * 256 * pairs, rel=0.01)  # two products, a multiplication and an addition


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_experts_are_counted_as_the_engine_does(name: str, tmp_path: Path) -> None:
    model, read = MODELS[name], hf_model_config(MODELS[name].write(tmp_path))
    both = 2 * model.head_parameters  # the head and the embedding
    assert model.layer_parameters + both == pytest.approx(read.num_active, rel=0.01)
    assert model.read_bytes(1, 1) == pytest.approx(model.layer_parameters)
    assert model.read_bytes(10_000, 1) + both == pytest.approx(read.num_parameters, rel=0.01)


def test_a_small_gpt_oss_loads_and_answers(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "vocab_size": 300, "num_local_experts": 8}
    small |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = changed("gpt-oss-20b", **small, head_dim=16, bos_token_id=1, eos_token_id=2).write(tmp_path)
    settings = {"device": "cpu", "threads": 1, "max_model_len": 512, "num_kv_blocks": 200}
    with LLM(path, load_format="dummy", skip_tokenizer_init=True, verbose=False, **settings) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
        answers = llm.generate([[5] * 200, [7, 8, 9]], sampling, use_tqdm=False)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [12, 12]


def test_every_kind_of_cache_that_the_engine_has_can_be_measured() -> None:
    assert floor.KV_BYTES.keys() == {"auto", *CACHE_DTYPES}
    assert floor.Precision.of(None, "int4").kv_bytes == 80 / 128  # of a head of 128 numbers


def test_experts_in_mxfp4_are_read_as_stored() -> None:
    wide, stored = MODELS["gpt-oss-20b"], MODELS["gpt-oss-20b-mxfp4"]
    experts = 24 * 32 * 3 * 2880**2
    saved = wide.read_bytes(10_000, 2) - stored.read_bytes(10_000, 2)
    assert saved == pytest.approx(experts * (2 - 0.53125))

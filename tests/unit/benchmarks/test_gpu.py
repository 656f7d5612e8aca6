"""The GPU benchmarks, as far as they can be held without one: their requests, floors and arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import floor, workloads
from benchmarks.gpu.device_profile import DeviceEvent, busy_parts
from benchmarks.gpu.models import MODELS, BenchModel, find_model
from quire.runtime.loading.hf.config import hf_model_config

TINY = BenchModel(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "hidden_act": "silu", "vocab_size": 12_000, "max_position_embeddings": 4_096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
)  # fmt: skip


def test_requests_are_the_same_in_every_run_and_others_in_every_repeat() -> None:
    for make in (workloads.nano, workloads.chat512, workloads.prefill, workloads.shared, workloads.n8):
        first = make(0)
        assert make(0) == first
        assert make(1).prompts != first.prompts
        assert list(map(len, make(1).prompts)) == list(map(len, first.prompts))
        assert all(1 <= token < 11_000 for token in make(1).prompts[0])


def test_a_staircase_decodes_at_every_number_of_rows() -> None:
    work = workloads.staircase([8, 4, 1])
    assert work.outputs == [2] * 4 + [4] * 3 + [6]
    live = [sum(count > step for count in work.outputs) for step in range(max(work.outputs))]
    assert live == [8, 8, 4, 4, 1, 1]


def test_float8_halves_what_is_read_of_layers_and_cache_but_not_of_the_head() -> None:
    model, small = MODELS["llama-3.1-8b"], floor.Precision.of("fp8", "fp8")
    assert small == floor.Precision(1, 1)
    assert floor.step_seconds(model, 1, 256, small) * 1e3 == pytest.approx(1.87, rel=0.01)
    saved = floor.step_seconds(model, 1, 256) - floor.step_seconds(model, 1, 256, small)
    assert saved == pytest.approx((model.layer_parameters + 256 * model.kv_numbers) / floor.BANDWIDTH)
    work = workloads.prefill(0)
    rate = work.num_prompt_tokens / floor.total_seconds(model, work, small)
    assert rate == pytest.approx(93_500, rel=0.01)
    assert set(gpu.PEER) <= {name + title for name in MODELS for title in gpu.TITLES.values()}


@pytest.mark.parametrize(
    ("name", "nano", "chat", "prefill", "tpot"),
    [("qwen3-0.6b", 36_000, 68_000, 708_000, 0.284), ("llama-3.1-8b", 13_290, 14_250, 54_500, 3.50)],
)
def test_floors_follow_from_the_shapes(name: str, nano: float, chat: float, prefill: float, tpot: float) -> None:
    model = MODELS[name]
    for make, wanted in ((workloads.nano, nano), (workloads.chat512, chat)):
        work = make(0)
        assert work.num_output_tokens / floor.total_seconds(model, work) == pytest.approx(wanted, rel=0.01)
    work = workloads.prefill(0)
    assert work.num_prompt_tokens / floor.total_seconds(model, work) == pytest.approx(prefill, rel=0.01)
    assert floor.step_seconds(model, 1, 256) * 1e3 == pytest.approx(tpot, rel=0.01)


def test_latents_and_experts_are_counted_as_the_engine_does(tmp_path: Path) -> None:
    model = MODELS["deepseek-v2-lite"]
    config = hf_model_config(model.write(tmp_path))
    assert model.kv_numbers == sum(spec.numbers for spec in config.kv_specs) == 27 * 576
    assert model.read_bytes(1, 1) == model.layer_parameters
    both = model.head_parameters * 2  # and the embedding
    assert model.layer_parameters + both == pytest.approx(config.num_active, rel=0.01)
    assert model.read_bytes(10_000, 1) + both == pytest.approx(config.num_parameters, rel=0.01)


SMALL = {
    "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 32,
    "model_type": "mistral",
}  # fmt: skip


def test_any_shape_is_found_by_its_config(tmp_path: Path) -> None:
    assert find_model("qwen3-0.6b") is MODELS["qwen3-0.6b"]
    config = {**SMALL, "num_key_value_heads": None, "sliding_window": None, "layer_types": None, "num_experts": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (tmp_path, tmp_path / "config.json"):
        found = find_model(str(name))
        assert found.config == {**config, "head_dim": 16, "num_key_value_heads": 6}  # what is null stays null
        assert found.windows == {None: 2}
        assert found.load_format == "dummy"
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "kv_lora_rank": 16, "q_lora_rank": None}))
    assert "head_dim" not in find_model(str(tmp_path)).config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must hold a JSON object"),
        (json.dumps({**SMALL, "hidden_size": 0, "vocab_size": None}), "hidden_size, vocab_size must be whole numbers"),
        (json.dumps({"text_config": SMALL}), "of a model for images, its text_config"),
        (json.dumps({**SMALL, "quantization_config": {"quant_method": "awq"}}), "use --quantization"),
    ],
)
def test_a_config_that_is_no_shape_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        find_model(str(tmp_path))
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    with pytest.raises(ValueError, match=r"nowhere is neither one of qwen3-0\.6b, .* nor a config\.json"):
        find_model("nowhere")


def test_a_bench_runs_requests_and_says_how_far_they_are_from_the_floor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "WARM_UP", [4, 1])
    monkeypatch.setitem(gpu.WHOLE, "nano", lambda repeat: workloads.Workload([[5, 6 + repeat]] * 3, [4, 2, 3]))
    bench = gpu.Bench("qwen3-0.6b", TINY, {"device": "cpu", "num_kv_blocks": 600, "threads": 1, "max_num_seqs": 8})
    bench.start()
    bench.warm_up()
    bench.run("nano", 0)
    bench.run("nano", 1)
    lines = {line[0]: line for line in bench.summary()}
    assert lines["nano"][2] == "out tok/s"
    assert lines["nano"][4].endswith("%")
    assert len(bench.found["nano"]) == 2
    assert capsys.readouterr().out.count("RESULT ") == 4
    bench.llm.close()


def test_overlapping_work_keeps_the_device_busy_once() -> None:
    begun = 1_795_123_646_681_481_361  # nanoseconds since 1970, as the profiler counts: more digits than a float holds
    spans = [(0, 10), (5, 15), (25, 30)]
    events = [DeviceEvent("kernel", begun + begin, begun + end) for begin, end in spans]
    assert busy_parts(events, 3) == [1.0, 0.5, 0.5]

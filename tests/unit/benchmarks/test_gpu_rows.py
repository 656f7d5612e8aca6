"""The row of long prompts, and the cache full of old blocks, over models small enough for a CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import floor, workloads
from benchmarks.gpu.models import MODELS, BenchModel
from benchmarks.gpu.workloads import Workload
from quire import LLM, SamplingParams
from quire.engine.kvcache.grouped_pool import GroupedPool

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SETTINGS = {"device": "cpu", "num_kv_blocks": 600, "threads": 1, "max_num_seqs": 8}


def small(name: str, **values: object) -> BenchModel:
    ids = {"vocab_size": 12_000, "bos_token_id": 1, "eos_token_id": 2}
    return replace(MODELS[name], config=MODELS[name].config | SMALL | ids | values)


GEMMA = small("gemma-3-4b", num_hidden_layers=6, sliding_window=64)
LLAMA = small("llama-3.1-8b", num_hidden_layers=1)


def test_long_prompts_are_those_that_the_peer_was_asked() -> None:
    work = workloads.long(0)
    assert [len(prompt) for prompt in work.prompts] == [32_508] * 8
    assert work.outputs == [256] * 8
    assert all(10 <= token <= 9_000 for prompt in work.prompts for token in prompt)
    assert workloads.long(1).prompts[0][:64] != work.prompts[0][:64]
    assert workloads.LONG_CONTEXT >= 32_508 + 256


@pytest.mark.parametrize("length", [(), ("--max-model-len", "32767")])
def test_long_prompts_are_refused_where_they_do_not_fit(
    length: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--rows", "nano,long", *length])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "the row long needs --max-model-len 32768, not" in capsys.readouterr().err


def test_the_first_long_prompt_is_asked_alone_and_then_found(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload([[place] * 64 for place in range(20, 24)], [8] * 4)
    monkeypatch.setattr(workloads, "long", lambda repeat: work)
    bench = gpu.Bench("qwen3-0.6b", LLAMA, SETTINGS)
    before = bench.llm._client._core.stats().prefix_hits
    bench.run("long", 0)
    assert bench.llm._client._core.stats().prefix_hits - before >= 48
    lines = {line[0]: line for line in bench.summary()}
    assert [lines[name][2] for name in ("long", "long ttft")] == ["out tok/s", "ms"]
    assert all(line[4].endswith("%") for line in lines.values())
    assert bench.floors["long"] > work.num_output_tokens / floor.total_seconds(LLAMA, work)  # the first costs nothing
    bench.llm.close()


@pytest.mark.parametrize(("model", "has_windows"), [(LLAMA, False), (GEMMA, True)], ids=["llama", "gemma"])
def test_a_cache_is_filled_whatever_its_layers_keep(model: BenchModel, has_windows: bool, tmp_path: Path) -> None:
    path = model.write(tmp_path)
    with LLM(path, load_format="dummy", skip_tokenizer_init=True, verbose=False, max_model_len=512, **SETTINGS) as llm:
        scheduler = llm._client._core._scheduler
        assert isinstance(scheduler.pool, GroupedPool) == has_windows
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
        prompts = [[place] * 200 for place in range(3, 9)]
        wanted = [answer.outputs[0].token_ids for answer in llm.generate(prompts, sampling, use_tqdm=False)]
        for _ in range(2):
            llm.reset_prefix_cache()
            gpu.fill_cache(llm)
            pool = scheduler.pool
            assert not pool.num_used
            assert pool.num_evictable > pool.num_blocks // 2
            assert has_windows or pool.num_evictable == pool.num_blocks
            pool.check(pool.num_evictable)
            found = [answer.outputs[0].token_ids for answer in llm.generate(prompts, sampling, use_tqdm=False)]
            assert found == wanted

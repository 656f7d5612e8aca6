"""Adapters of routed experts: rows with different ones in a batch, and without, compute what each merged model does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_batches import check_batch
from adapter_files import SMALL, change_adapter
from expert_adapters import Form, make_expert_adapter, merged_experts
from family_bench import BACKENDS
from family_models import NUM_TOKENS, VOCAB, FamilyCase
from interpreter import HAS_TRITON
from quire.config.adapter_memory import adapter_memory
from quire.runtime.layers import experts
from quire.runtime.models.build import count_weights
from quire.runtime.sampling.make import make_sampler
from quire.types.errors import InvalidRequest
from quire.types.step import Chunk
from tests.families.test_expert_parallel import CHANGES as UNEVEN
from tiny_models import Bench, engine_config, greedy_reference
from worker_executor import TinyEngine

EXPERTS = replace(SMALL, experts=True)
IN_FULL = "QUIRE_TEST_WHOLE" in os.environ  # make families
PATTERN_BACKENDS = BACKENDS if IN_FULL else ["reference", "gather", "auto"]


def bench_of(case: FamilyCase, attention: str) -> Bench:
    return Bench(case.checkpoint(), engine_config(adapters=EXPERTS), attention=attention)  # type: ignore[arg-type]


def check(name: str, forms: tuple[Form, Form], attention: str, folder: Path) -> None:
    case = FamilyCase(name, folder / "model")
    first = make_expert_adapter(folder / "first", case.model, forms[0], seed=1)
    second = make_expert_adapter(folder / "second", case.model, forms[1], seed=2, rank=7, use_rslora=True, others=False)
    bench = bench_of(case, attention)
    bench.put_adapter(2, first)
    bench.put_adapter(0, second)
    ones, others = merged_experts(case.model, first), merged_experts(case.model, second)
    check_batch(bench, [ones, case.model, others, ones], [2, -1, 0, 2])


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h-moe"])
def test_adapters_of_experts_change_what_merged_weights_would(name: str, attention: str, tmp_path: Path) -> None:
    """Names of other projects, shared experts, biases, gates with limits whose outputs come in turns."""
    if attention == "triton" and name not in ("deepseek_v3", "nemotron_h-moe") and not IN_FULL:
        pytest.skip("tests of ranks and of parts that are left alone run its kernels; make families runs it")
    check(name, ("each", "fused"), attention, tmp_path)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v2", "gemma4_text-moe", "qwen3_next", "qwen3_5_moe_text"])
def test_all_families_of_mixtures_take_them(name: str, tmp_path: Path) -> None:
    check(name, ("fused", "each"), "auto", tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_parameters_that_peft_before_0_19_saved_are_read_as_it_meant_them(name: str, tmp_path: Path) -> None:
    check(name, ("old", "fused"), "auto", tmp_path)


@pytest.mark.parametrize("attention", BACKENDS)
def test_parts_that_an_adapter_leaves_alone_stay_as_they_are(attention: str, tmp_path: Path) -> None:
    """Of one some experts have no matrices, of another all have none of down."""
    case = FamilyCase("qwen3_moe", tmp_path / "model")
    some: Callable[[str, int], bool] = lambda part, expert: expert % 3 == 0 and part != "up_proj"  # noqa: E731
    first = make_expert_adapter(tmp_path / "first", case.model, "each", seed=1, only=some, others=False)
    up: Callable[[str, int], bool] = lambda name, _: name == "gate_up_proj"  # noqa: E731
    second = make_expert_adapter(tmp_path / "second", case.model, "fused", seed=2, only=up)
    bench = bench_of(case, attention)
    bench.put_adapter(0, second)
    bench.put_adapter(1, second)
    bench.put_adapter(1, first)  # nothing of the one before is left
    models = [merged_experts(case.model, folder) for folder in (first, second)]
    check_batch(bench, [models[0], case.model, models[1]], [1, -1, 0])


# Patterns of single experts, of the matrices of all of them, and of parameters; the first that fits counts.
SINGLE = {
    "rank_pattern": {r"experts\.[0-2]\.up_proj": 7, "layers.1.mlp.experts.1.down_proj": 2, "up_proj": 3},
    "alpha_pattern": {r"experts\.2\.gate_proj": 3.0, "down_proj": 9.5},
}
WHOLE = {
    "rank_pattern": {"experts.down_proj": 7, r"layers\.0\.mlp\.experts\.gate_up_proj": 3},
    "alpha_pattern": {"gate_up_proj": 2.5},
}


def patterned(case: FamilyCase, folder: Path) -> tuple[Path, Path]:
    """Adapters of experts as modules and as parameters, with patterns."""
    first = make_expert_adapter(folder / "first", case.model, "each", seed=1, others=False, **SINGLE)
    return first, make_expert_adapter(folder / "second", case.model, "fused", seed=2, others=False, **WHOLE)


@pytest.mark.parametrize("attention", PATTERN_BACKENDS)  # slots are filled alike for all backends
def test_patterns_say_the_ranks_and_scales_of_experts(attention: str, tmp_path: Path) -> None:
    case = FamilyCase("qwen3_moe", tmp_path / "model")
    first, second = patterned(case, tmp_path)
    bench = bench_of(case, attention)
    bench.put_adapter(2, first)
    bench.put_adapter(0, second)
    models = [merged_experts(case.model, folder) for folder in (first, second)]
    check_batch(bench, [models[0], case.model, models[1]], [2, -1, 0])


@pytest.mark.parametrize("ranks", [{"tensor": 2}, {"tensor": 2, "expert": True}, {"stages": 2}])
def test_ranks_follow_patterns_too(ranks: dict[str, Any], tmp_path: Path) -> None:
    case = FamilyCase("qwen3_moe", tmp_path / "model")
    folders, prompt = patterned(case, tmp_path), case.prompt(11)
    made = TinyEngine(case.checkpoint(), adapters=EXPERTS, **ranks)  # type: ignore[arg-type]
    for folder in folders:
        made.core.adapters.load(folder.name, str(folder))
        made.submit(folder.name, prompt, adapter=folder.name, max_tokens=NUM_TOKENS)
    made.run()
    made.executor.close()
    found = [list(made.finished[folder.name].samples[0].token_ids) for folder in folders]
    models = [merged_experts(case.model, folder) for folder in folders]
    assert found == [greedy_reference(model, prompt, NUM_TOKENS)[0] for model in models]
    assert case.expected(prompt) not in found


def test_tensors_of_experts_that_patterns_do_not_fit_are_refused(tmp_path: Path) -> None:
    case = FamilyCase("qwen3_moe", tmp_path / "model")
    bench, (single, whole) = bench_of(case, "auto"), patterned(case, tmp_path)
    change_adapter(single, rank_pattern={**SINGLE["rank_pattern"], r"experts\.3\.gate_proj": 5})
    assert "experts.3.gate_proj.lora_A.weight has shape [4, 64], the model and" in refusal(bench, single)
    change_adapter(single, rank_pattern={"experts.0.up_proj": 17})
    assert "mlp.experts.0.up_proj has rank 17, the limit is 16" in refusal(bench, single)
    change_adapter(whole, rank_pattern={"experts.down_proj": 17})
    assert "mlp.experts.down_proj has rank 17, the limit is 16" in refusal(bench, whole)


def test_experts_without_compiled_products_are_changed_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those whose columns are put in order; also where the last block computes the wanted tokens alone."""
    monkeypatch.setattr(experts, "native_weights", lambda _: None)
    check("mixtral", ("each", "fused"), "auto", tmp_path)


def test_quantized_experts_and_adapters_go_together(tmp_path: Path) -> None:
    """The change lies beside the stored weights."""
    case = FamilyCase("qwen3_moe", tmp_path / "model")
    folder = make_expert_adapter(tmp_path / "adapter", case.model, "fused", others=False)
    found = {}
    for quantization in (None, "int8"):
        for slot in (0, -1):
            config = engine_config(adapters=EXPERTS, quantization=quantization)  # type: ignore[arg-type]
            bench = Bench(case.checkpoint(), config)  # type: ignore[arg-type]
            bench.put_adapter(0, folder)
            bench.add(0, case.prompt(9), adapter=slot)
            bench.run(chunks=[Chunk(0, 0, 9, (0,))])
            found[quantization, slot] = bench.sampler.seen[0][0]
    wanted = found[None, 0]
    assert (found["int8", 0] - wanted).norm() < 0.1 * (found["int8", -1] - wanted).norm()


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_graphs_follow_rows_whose_adapters_change(name: str, tmp_path: Path) -> None:
    """The slots of rows, and so the matrices of the experts that they go to, are found on the device."""
    case = FamilyCase(name, tmp_path / "model")
    folders = [make_expert_adapter(tmp_path / str(seed), case.model, "fused", seed=seed) for seed in range(3)]
    benches = []
    for attention, kernels in (("reference", "torch"), ("triton", "triton")):
        config = engine_config(rows=4, num_blocks=64, max_len=64, adapters=EXPERTS)
        sampler = make_sampler(4, VOCAB, torch.device(config.device.device), kernels)
        bench = Bench(case.checkpoint(), config, attention=attention, sampler=sampler)  # type: ignore[arg-type]
        for slot, folder in enumerate(folders[:2]):
            bench.put_adapter(slot, folder)
        for row, slot in enumerate((0, -1, 1)):
            bench.add(row, case.prompt(5 + row, row), adapter=slot)
        bench.run(chunks=[Chunk(row, 0, 5 + row, (row,)) for row in range(3)])
        bench.run(decode=[0, 1, 2])
        bench.run(decode=[1, 2, 0])
        bench.release(2)
        bench.put_adapter(1, folders[2])
        bench.add(3, case.prompt(4, 9), adapter=1)
        bench.run(chunks=[Chunk(3, 0, 4, (3,))])
        bench.run(decode=[3, 0, 1])
        benches.append(bench)
    plain, triton = benches
    assert triton.tokens == plain.tokens
    assert {kind.adapters for kind in triton.worker._graphs._graphs} == {True}  # type: ignore[attr-defined]


RANKS: dict[str, dict[str, Any]] = {"tp2": {"tensor": 2}, "ep2": {"tensor": 2, "expert": True}, "pp2": {"stages": 2}}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("attention", ["gather", "auto", "triton"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_ranks_hold_their_part_of_an_adapter(name: str, attention: str, ranks: str, tmp_path: Path) -> None:
    """Of every expert, of their own experts, or of their layers: the first of a pipeline has none of DeepSeek's."""
    if attention == "triton" and (not HAS_TRITON or (name, ranks) not in (("mixtral", "tp2"), ("gpt_oss", "ep2"))):
        pytest.skip("the kernels know nothing of ranks")
    case = FamilyCase(name, tmp_path / "model", UNEVEN[name] if ranks == "ep2" else {})
    folders = [make_expert_adapter(tmp_path / form, case.model, form) for form in ("each", "fused")]  # type: ignore[arg-type]
    sizes = {"block_size": 16, "num_blocks": 16, "rows": 3, "max_len": 64} if attention == "triton" else {}
    count = 3 if attention == "triton" else NUM_TOKENS
    made = TinyEngine(case.checkpoint(), attention=attention, adapters=EXPERTS, **RANKS[ranks], **sizes)  # type: ignore[arg-type]
    prompt = case.prompt(11)
    for number, folder in enumerate(folders):
        made.core.adapters.load(f"adapter {number}", str(folder))
        made.submit(f"adapter {number}", prompt, adapter=f"adapter {number}", max_tokens=count)
    made.submit("plain", prompt, max_tokens=count)
    made.run()
    made.executor.close()
    found = {name: list(message.samples[0].token_ids) for name, message in made.finished.items()}
    models = [merged_experts(case.model, folder) for folder in folders]
    wanted = {f"adapter {n}": greedy_reference(model, prompt, count)[0] for n, model in enumerate(models)}
    assert found == {"plain": case.expected(prompt)[:count], **wanted}


def refusal(bench: Bench, folder: Path) -> str:
    assert bench.worker.adapters is not None
    with pytest.raises(InvalidRequest) as caught:
        bench.worker.adapters.store.read("adapter", str(folder))
    return str(caught.value)


def test_what_does_not_fit_the_experts_is_refused_by_name(tmp_path: Path) -> None:
    case = FamilyCase("qwen3_moe", tmp_path / "model")
    other = FamilyCase("qwen3_moe", tmp_path / "other", {"moe_intermediate_size": 48, "num_experts": 9})
    bench = bench_of(case, "auto")
    assert "fit no parameter of the experts" in refusal(
        bench, make_expert_adapter(tmp_path / "size", other.model, "fused", others=False)
    )
    assert "experts.8.down_proj.lora_A.weight: the model has no such module" in refusal(
        bench, make_expert_adapter(tmp_path / "number", other.model, "each", others=False, only=lambda _, e: e == 8)
    )
    large = make_expert_adapter(tmp_path / "rank", case.model, "fused", rank=17)
    assert "has rank 17, the limit is 16" in refusal(bench, large)
    twice = make_expert_adapter(tmp_path / "twice", case.model, "fused", others=False)
    add_single(twice, case)
    assert "are of the same module" in refusal(bench, twice)


def add_single(folder: Path, case: FamilyCase) -> None:
    """Beside its parameters, the modules of the experts."""
    from safetensors.torch import load_file, save_file

    single = make_expert_adapter(folder / "single", case.model, "each", others=False)
    tensors = [load_file(each / "adapter_model.safetensors") for each in (folder, single)]
    save_file(tensors[0] | tensors[1], folder / "adapter_model.safetensors")


@pytest.mark.parametrize("ranks", [{"tensor": 2, "expert": True}, {"stages": 2}])
def test_ranks_refuse_what_one_process_refuses(ranks: dict[str, Any], tmp_path: Path) -> None:
    case = FamilyCase("mixtral", tmp_path / "model")
    other = FamilyCase("mixtral", tmp_path / "other", {"intermediate_size": 48})
    fits = make_expert_adapter(tmp_path / "fits", case.model, "fused", others=False)
    wrong = make_expert_adapter(tmp_path / "wrong", other.model, "fused", others=False)
    for adapters, folder, said in (
        (SMALL, fits, "adapters of routed experts are not enabled"),
        (EXPERTS, wrong, "fit no parameter of the experts"),
    ):
        made = TinyEngine(case.checkpoint(), adapters=adapters, **ranks)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=said):
            made.core.adapters.load("adapter", str(folder))
        made.executor.close()


@pytest.mark.parametrize("form", ["each", "fused"])
def test_without_room_for_them_the_setting_is_named(form: Any, tmp_path: Path) -> None:
    case = FamilyCase("mixtral", tmp_path / "model")
    bench = Bench(case.checkpoint(), engine_config(adapters=SMALL))  # type: ignore[arg-type]
    folder = make_expert_adapter(tmp_path / "adapter", case.model, form)
    assert "adapters of routed experts are not enabled; set lora_experts" in refusal(bench, folder)


@pytest.mark.parametrize("attention", ["gather", "auto"])
def test_the_memory_plan_counts_the_slots_of_experts(attention: str, tmp_path: Path) -> None:
    case = FamilyCase("mixtral", tmp_path)
    bench = bench_of(case, attention)
    assert bench.worker.adapters is not None
    held = 0
    for layer in bench.worker.adapters.slots.layers:
        tensors = [getattr(layer, name) for name in ("a", "b") if hasattr(layer, name)]
        held += sum(tensor.nbytes for tensor in tensors) if tensors else layer.num_bytes  # type: ignore[attr-defined]
    model = count_weights(case.checkpoint().config)
    planned, plain = (adapter_memory(model, each, 4, max_tokens=0) for each in (EXPERTS, SMALL))
    assert held <= planned < 1.05 * held
    assert planned > 2 * plain
    assert adapter_memory(model, EXPERTS, 4, max_tokens=64) > planned


def test_the_digest_tells_adapters_of_experts_apart(tmp_path: Path) -> None:
    case = FamilyCase("mixtral", tmp_path / "model")
    bench = bench_of(case, "auto")
    assert bench.worker.adapters is not None
    folders = [
        make_expert_adapter(tmp_path / str(number), case.model, form, seed=seed)  # type: ignore[arg-type]
        for number, (form, seed) in enumerate((("fused", 1), ("fused", 1), ("fused", 2), ("each", 1)))
    ]
    digests = [bench.worker.adapters.store.read("adapter", str(folder)).digest for folder in folders]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3

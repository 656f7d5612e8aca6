"""Ranks as processes with everything at once: chunked prompts, a prefix cache, preemption, drafts, beams, grammars,
samples and adapters. The tokens are those of one process without drafts and prefix cache that has blocks for all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from adapter_files import make_adapter
from family_models import FamilyCase
from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.runtime.loading.resolve import resolve_model
from quire.types.errors import QuireError
from quire.types.stats import EngineStats
from tests.families.test_rank_processes import QUANTIZED, SHAPES
from tests.families.test_stages import CHANGES

pytest.importorskip("transformers")
pytest.importorskip("llguidance")
WHOLE = "QUIRE_TEST_WHOLE" in os.environ  # make families
FAMILIES = ("qwen3", "gemma3_text", "mixtral", "deepseek_v3", "qwen3_next")
MODELS = (*FAMILIES, "quantized", "adapter", "smollm2")
USUAL: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "threads": 2, "max_num_seqs": 12, "max_model_len": 64, "block_size": 4,
    "cpu_weights": "float",
}  # fmt: skip
EASY: dict[str, Any] = {"num_kv_blocks": 256, "enable_prefix_caching": False}
HARD: dict[str, Any] = {
    "num_kv_blocks": 24, "max_num_batched_tokens": 16,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
}  # fmt: skip
CASES = CHANGES | {"mixtral": {"sliding_window": None}}
BLOCKS = {"gemma3_text": 56}  # those of windows among them
PROMPTS = [
    [5, 9, 31, 7, 12, 44] * 4,
    *([(7 * place * place + length) % 50 + 3 for place in range(length)] for length in (30, 9)),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
WAYS = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=8, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=9, repetition_penalty=1.2, seed=5, max_tokens=8),
    SamplingParams(temperature=0.0, max_tokens=12, structured_outputs={"regex": "[0-9A-F]{4,9}"}),
    SamplingParams(temperature=0.9, seed=8, max_tokens=12, structured_outputs={"choice": ["ABBA", "ACDC", "12345"]}),
)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8)


class Model(NamedTuple):
    name: str
    path: Path
    adapter: LoRARequest | None = None


def answers(model: Model, **settings: Any) -> tuple[list[Any], EngineStats]:
    """Tokens of requests of all kinds at once, twice, and of beams."""
    with LLM(model.path, **(USUAL | settings), enable_lora=model.adapter is not None) as llm:
        others: dict[str, Any] = {"use_tqdm": False, "lora_request": model.adapter}
        found = []
        for _ in range(2):
            outputs = llm.generate(PROMPTS * len(WAYS), [way for way in WAYS for _ in PROMPTS], **others)
            found += [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
        beams = llm.beam_search(PROMPTS, BEAMS, **others)
        found += [[list(each.tokens) for each in search.sequences] for search in beams]
        return found, llm.stats()


def write_tokenizer(folder: Path, size: int) -> None:
    """One token for each of the first printable characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_quantized(folder: Path) -> Path:
    """The GPTQ checkpoint with its one layer three times, for two stages."""
    folder.mkdir(parents=True)
    tensors = load_file(QUANTIZED / "model.safetensors")
    layer = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    for number in (1, 2):
        tensors |= {name.replace(".layers.0.", f".layers.{number}."): each.clone() for name, each in layer.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((QUANTIZED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    write_tokenizer(folder, config["vocab_size"])
    return folder


@pytest.fixture(scope="module", params=MODELS if WHOLE else ("qwen3",))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    if name == "smollm2":
        try:
            return Model(name, resolve_model(None).path)
        except QuireError as error:
            pytest.skip(f"the default model is not here: {error}")
    if name == "quantized":
        return Model(name, write_quantized(folder / "model"))
    family = "llama" if name == "adapter" else name
    case = FamilyCase(family, folder / "model", CASES.get(family, {}))
    assert case.model is not None  # it is written
    adapter = LoRARequest("mine", 1, str(make_adapter(folder, case.model))) if name == "adapter" else None
    write_tokenizer(case.directory, 97)
    return Model(name, case.directory, adapter)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Any]:
    return answers(model, **EASY)[0]


@pytest.mark.parametrize("shape", SHAPES if WHOLE else ["tp2-pp2"])
def test_ranks_with_everything_at_once_give_the_tokens_of_one_process(
    model: Model, expected: list[Any], shape: str
) -> None:
    tensor, pipeline = SHAPES[shape]
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    blocks = BLOCKS.get(model.name, HARD["num_kv_blocks"])
    found, stats = answers(model, **(HARD | ranks | {"num_kv_blocks": blocks}))
    assert found == expected
    assert stats.preemptions
    assert stats.prefix_hits
    assert stats.drafted_tokens or model.name == "qwen3_next"  # whose drafts do not pay here


@pytest.mark.parametrize("shape", SHAPES if WHOLE else ["tp2-pp2"])
def test_so_do_ranks_of_the_last_stage_that_draft_by_a_model(model: Model, expected: list[Any], shape: str) -> None:
    """The model itself, whose drafts are accepted."""
    if model.name == "qwen3_next":
        pytest.skip("recurrent layers cannot draft")
    tensor, pipeline = SHAPES[shape]
    ranks: dict[str, Any] = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    ranks["num_kv_blocks"] = BLOCKS.get(model.name, HARD["num_kv_blocks"])
    ranks["speculative_config"] = {"method": "draft_model", "model": str(model.path), "num_speculative_tokens": 3}
    found, stats = answers(model, **(HARD | ranks))
    assert found == expected
    assert stats.preemptions
    assert stats.accepted_tokens

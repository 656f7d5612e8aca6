"""Encoders whose layers ranks share: hidden states, embeddings and logits are those of one process."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_models import CONFIGS, TEXTS, hf_classifier, hf_encoder, hidden_states, load_classifier, load_encoder
from local_ranks import LocalGroup, run_ranks
from quire import LLM, ConfigError, QuireError
from quire.config.arguments import EngineArguments
from quire.config.embedding import EncoderConfig
from quire.config.engine import DeviceConfig
from quire.config.parallel import ParallelConfig
from quire.runtime.encoder.encoder import TextEncoder, TextRunner
from quire.runtime.loading.files import files_at
from quire.runtime.loading.model_config import read_model_config
from quire.runtime.models.build import count_rank_weights
from quire.runtime.parallel.group import ONE_RANK
from quire.runtime.parallel.ranks import Ranks
from quire.serving.assembly import plan_model

pytest.importorskip("transformers")
ON_CPU = DeviceConfig(device="cpu", dtype="float32", kv_dtype="float32")


def of_ranks(folder: Path, size: int, work: Any) -> list[Any]:
    """What `work` returns for the encoder of each rank."""
    files, parallel = files_at(folder), ParallelConfig(tensor=size)
    model = read_model_config(files)

    def run(group: LocalGroup) -> Any:
        ranks = Ranks(parallel.place(group.index), group, ONE_RANK)
        config = EncoderConfig(ON_CPU, model.rope.max_position, 64, 200, parallel=parallel)
        return work(TextEncoder(files, model, config, ranks=ranks))

    return run_ranks(size, run)


@pytest.mark.parametrize("size", [2, 3])  # three do not divide the four heads
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_ranks_compute_the_hidden_states_of_one_process(family: str, size: int, tmp_path: Path) -> None:
    hf_encoder(family).save_pretrained(tmp_path)
    wanted = hidden_states(load_encoder(tmp_path), TEXTS)
    for found in of_ranks(tmp_path, size, lambda encoder: hidden_states(encoder, TEXTS)):
        for own, states in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, states, rtol=1e-4, atol=1e-4)


def test_a_rank_has_its_share_of_the_weights_and_the_plan_counts_it(tmp_path: Path) -> None:
    hf_encoder("bert").save_pretrained(tmp_path)
    model = read_model_config(files_at(tmp_path))
    held = of_ranks(tmp_path, 2, lambda encoder: encoder.num_bytes)
    counted = count_rank_weights(model, ParallelConfig(tensor=2)).rank_weights
    assert counted is not None
    assert max(held) == 4 * counted.parameters
    blocks = [4 * model.hidden_size * model.hidden_size, 2 * model.hidden_size * model.intermediate_size]
    shared = model.num_layers * sum(blocks) + model.vocab_size * model.hidden_size
    assert 4 * model.num_parameters - max(held) >= 4 * shared // 2  # all matrices and the embedding are halved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    hf_encoder("bert").save_pretrained(path)
    return path


SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 2, "max_num_seqs": 3, "skip_tokenizer_init": True}
IDS = [list(text) for text in TEXTS]


def test_processes_make_the_embeddings_of_one_and_a_killed_one_is_named(folder: Path) -> None:
    with LLM(folder, **SETTINGS) as llm:
        wanted = [output.embedding for output in llm.embed(IDS)]
    with LLM(folder, tensor_parallel_size=2, **SETTINGS) as llm:
        for _ in range(2):
            found = [output.embedding for output in llm.embed(IDS)]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
        processes: Any = llm._loaded.texts.encoder.processes  # type: ignore[union-attr]
        os.kill(processes.ranks[1].process.pid, signal.SIGKILL)
        with pytest.raises(QuireError, match="rank 1 of 2 .*was killed by signal 9"):
            llm.embed(IDS)


def rows_of(encoder: TextRunner, firsts: list[int]) -> torch.Tensor:  # [texts, size]
    found = {}
    for batch, rows in encoder.run(TEXTS, first_parts=firsts):
        found |= dict(zip(batch, rows, strict=True))
    return torch.stack([found[number] for number in range(len(TEXTS))])


def test_a_server_s_core_encodes_pairs_by_ranks(tmp_path: Path) -> None:
    """The logits of a cross-encoder, whose second texts have another token type."""
    hf_classifier("bert", 1).save_pretrained(tmp_path)
    firsts = [4, 3, 1, 2, 50]
    wanted = rows_of(load_classifier(tmp_path), firsts)
    arguments = EngineArguments(device="cpu", threads=2, tensor_parallel_size=2, max_num_seqs=2)
    planned = plan_model(files_at(tmp_path), arguments)
    core: Any = planned.build_core("auto", lambda *_: None)  # type: ignore[union-attr]
    try:
        found = rows_of(core._encoder._encoder, firsts)
    finally:
        core.close()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_parallel_size": 2}, "^pipeline_parallel_size: is 2, and an encoder is not divided into stages"),
        ({"tensor_parallel_size": 2, "executor": "ray"}, "^executor: is 'ray', and the ranks of an encoder are"),
        ({"tensor_parallel_size": 2, "executor": "torchrun"}, "^executor: is 'torchrun', and the ranks of an encoder"),
        ({"tensor_parallel_size": 5}, "^tensor_parallel_size: 5 ranks cannot share 4 query heads"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "^enable_expert_parallel: is for models that"),
    ],
)
def test_what_ranks_of_an_encoder_cannot_do_is_refused_by_name(
    folder: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_model(files_at(folder), replace(EngineArguments(device="cpu"), **settings))

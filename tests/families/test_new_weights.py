"""Every family takes new weights while it runs, by their names in files and by those of the trained model, and then
gives exactly what an engine gives that was started from them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from family_bench import randomize
from family_models import FamilyCase
from packed_models import PACKED
from promises import check_same
from quire import LLM, SamplingParams
from tiny_models import DEVICE

pytest.importorskip("transformers")
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
SETTINGS: dict[str, Any] = {
    "device": DEVICE, "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "num_kv_blocks": 64,
    "max_num_seqs": 4,
}  # fmt: skip
CHOOSES_ALL = {"index_topk": SETTINGS["max_model_len"]}
STORED_APART = ("olmo_hybrid",)  # transformers holds as one tensor what its files have as three
Answer = list[tuple[int, dict[int, float]]]


def answers(llm: LLM, case: FamilyCase) -> list[Answer]:
    prompts = [{"prompt_token_ids": case.prompt(length, seed)} for seed, length in enumerate((5, 37))]
    found = []
    for output in llm.generate(prompts, SAMPLING, use_tqdm=False):
        one = output.outputs[0]
        logprobs = [{token: each.logprob for token, each in step.items()} for step in one.logprobs or ()]
        found.append(list(zip(one.token_ids, logprobs, strict=True)))
    return found


def usable(case: FamilyCase, folder: Path) -> FamilyCase:
    """The model with as many chosen tokens as a sequence has, where an indexer chooses them on a GPU, which has no
    kernels for fewer."""
    has_indexer = case.checkpoint().config.indexer is not None
    return FamilyCase(case.name, folder, CHOOSES_ALL) if has_indexer and DEVICE != "cpu" else case


def retrained(name: str, folder: Path, changes: dict[str, Any]) -> FamilyCase:
    """The same model with other weights."""
    case = FamilyCase(name, folder, changes)
    randomize(case.model, seed=7)
    case.model.save_pretrained(folder)  # type: ignore[operator]
    if (packed := PACKED.get(name.partition("-")[0])) is not None:
        packed.pack(folder, case.model.config)
    return case


def test_new_weights_answer_as_an_engine_that_was_started_from_them(case: FamilyCase, tmp_path: Path) -> None:
    case = usable(case, tmp_path / "usable")
    new = retrained(case.name, tmp_path, case.changes)
    assert case.model is not None  # its files are there
    sent: list[Iterable[tuple[str, Tensor]]] = [load_file(new.directory / "model.safetensors").items()]
    if case.name.partition("-")[0] not in (*PACKED, *STORED_APART):
        sent.append(new.model.state_dict().items())
    with LLM(str(new.directory), **SETTINGS) as fresh:
        wanted = answers(fresh, case)
    with LLM(str(case.directory), **SETTINGS) as llm:
        before = answers(llm, case)
        assert before != wanted
        for tensors in sent:
            llm.load_weights(tensors)
            check_same(answers(llm, case), wanted)
            llm.reload_weights()
            check_same(answers(llm, case), before)

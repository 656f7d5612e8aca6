"""The logits of every family, on every backend; and that its blocks are one compiled program."""

from __future__ import annotations

import os

import pytest

from family_bench import BACKENDS, check_parity, load_bench, num_calls
from family_models import FamilyCase
from quire.config.kv_cache import can_split, is_windowed
from tests.families.matrix import NOT_YET
from tiny_models import DEVICE

pytest.importorskip("transformers")
CALLED = {  # how often a program calls Python
    **dict.fromkeys(("apertus", "cohere-norms", "olmo-limit", "stablelm-norms", "deepseek_v32", "glm_moe_dsa"), 3),
    **dict.fromkeys(("mpt", "dbrx", "phimoe"), 3),  # a limit on queries, keys and values; the sparse mixer
    **dict.fromkeys(("recurrent_gemma", "olmo_hybrid"), 2),  # each recurrent layer
    "gemma3n_text": 21,  # three for the streams of each layer, one for each sparse gate
}  # fmt: skip
WHOLE = "QUIRE_TEST_WHOLE" in os.environ  # make families: Triton's interpreter is slow, and the matrix runs it too


@pytest.mark.parametrize("attention", BACKENDS if DEVICE != "cpu" or WHOLE else BACKENDS[:-1])
def test_logits_are_those_of_transformers(case: FamilyCase, attention: str) -> None:
    model = case.model
    if attention == "triton" and (case.name, "graphs") in NOT_YET:
        pytest.skip(NOT_YET[case.name, "graphs"])
    check_parity(case.directory, attention=attention, model=model)


@pytest.mark.parametrize("attention", ["reference", "gather", "auto"])
def test_layers_with_a_window_may_have_blocks_of_their_own(case: FamilyCase, attention: str) -> None:
    model = case.model
    specs = load_bench(case.directory).model_config.kv_specs
    if not can_split(specs) and not is_windowed(specs):
        pytest.skip("its layers are of one kind")
    check_parity(case.directory, attention=attention, model=model, split=True, block_size=2)


def test_all_blocks_are_one_compiled_program(case: FamilyCase) -> None:
    assert case.model is not None  # its files are there
    assert num_calls(load_bench(case.directory)) == CALLED.get(case.name, 0)

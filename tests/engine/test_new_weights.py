"""New weights beside what a model has more than its layers: a tied head, drafters, adapters, tiers, quantization."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from adapter_files import make_adapter
from family_bench import randomize
from family_models import FamilyCase
from gguf_exports import export_gguf
from mtp_heads import MtpCase
from quire import LLM, LoRARequest, SamplingParams
from quire.types.errors import InvalidRequest
from quire.types.standby import Command
from tiny_models import DEVICE

PROMPTS = ([5, 9, 2, 11, 7, 3, 8, 1, 30, 12], [4, 4, 17])
LONG = list(range(3, 60))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": DEVICE, "dtype": "float32", "enable_sleep_mode": True, "skip_tokenizer_init": True, "max_model_len": 128,
    "num_kv_blocks": 64, "max_num_seqs": 4,
}  # fmt: skip
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}


class Pair:
    """Two checkpoints of one model."""

    def __init__(self, folder: Path, name: str = "llama", changes: dict[str, Any] | None = None) -> None:
        self.old, self.new = (FamilyCase(name, folder / which, changes or {}) for which in ("old", "new"))
        assert self.old.model is not None  # its files are there
        randomize(self.new.model, seed=7)
        self.new.model.save_pretrained(self.new.directory)  # type: ignore[operator]

    def tensors(self) -> dict[str, Tensor]:
        """As a trainer sends them: by the names of the module, where a tied head is one of them."""
        return dict(self.new.model.state_dict())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def answers(llm: LLM, *prompts: list[int], **others: Any) -> list[list[int]]:
    asked = [{"prompt_token_ids": each} for each in prompts or PROMPTS]
    outputs = llm.generate(asked, GREEDY, use_tqdm=False, **others)
    return [list(output.outputs[0].token_ids) for output in outputs]


def fresh(folder: Path, *prompts: list[int], lora: LoRARequest | None = None, **settings: Any) -> list[list[int]]:
    """What an engine answers that was started from these files."""
    with LLM(str(folder), **SETTINGS | settings) as llm:
        return answers(llm, *prompts, **({} if lora is None else {"lora_request": lora}))


def state(llm: LLM) -> Any:
    return llm._command(Command("state"))


# ----------------------------------------------------------------------------------------------------- tied heads
@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("tied"), changes={"tie_word_embeddings": True})


@pytest.fixture(scope="module", params=[{}, {"tensor_parallel_size": 2}, {"quantization": "int8"}], ids=str)
def tied_llm(tied: Pair, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(tied.old.directory), **SETTINGS | request.param) as llm:
        yield llm


def test_the_head_of_a_tied_model_is_taken_if_it_equals_the_embedding(tied: Pair, tied_llm: LLM) -> None:
    tensors = tied.tensors()
    assert HEAD in tensors
    before = answers(tied_llm)
    tied_llm.load_weights(tensors.items())
    after = answers(tied_llm)
    assert after != before
    head = tensors.pop(HEAD)
    tied_llm.load_weights([(HEAD, head)])  # beside the embedding of an earlier call
    tied_llm.load_weights([(HEAD, head.bfloat16()), (TABLE, head.bfloat16().float())])  # of another dtype
    tied_llm.load_weights(tensors.items())
    assert answers(tied_llm) == after
    tied_llm.reload_weights()
    assert answers(tied_llm) == before


@pytest.mark.parametrize("has_table", [True, False])
def test_another_head_of_a_tied_model_is_refused_by_its_name(tied: Pair, tied_llm: LLM, has_table: bool) -> None:
    before, table = answers(tied_llm), load_file(tied.old.directory / "model.safetensors")[TABLE]
    head = table.clone()
    head[50, 3] += 1.0
    given = [(HEAD, head), *([(TABLE, table)] if has_table else [])]
    with pytest.raises(InvalidRequest, match=r"lm_head.weight: differs from the embedding"):
        tied_llm.load_weights(given)
    with pytest.raises(InvalidRequest, match=r"lm_head.weight: differs from the embedding"):
        tied_llm.load_weights([(HEAD, head[:5]), *given[1:]])
    assert answers(tied_llm) == before


# ------------------------------------------------------------------------------------------------------- drafters
@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of a model with an MTP head."""
    folder = tmp_path_factory.mktemp("headed")
    case = MtpCase(FamilyCase("glm4_moe", folder / "old"))
    case.save()
    shutil.copytree(folder / "old", folder / "new", ignore=shutil.ignore_patterns("head"))
    noise = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "old" / "model.safetensors")
    changed = {
        name: tensor + torch.randn(tensor.shape, generator=noise) * 0.1 if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_file(changed, folder / "new" / "model.safetensors")
    return folder / "old", folder / "new"


def head_of(llm: LLM) -> list[Tensor]:
    """The weights of a running MTP head, as its layers hold them."""
    part = llm._client._core.executor.standby._head  # type: ignore[attr-defined]
    return [tensor.clone() for layer in part.weights._entries for tensor in layer.layer.parameters(recurse=False)] + [
        tensor.clone() for tensor in part.weights.tensors()
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def test_an_mtp_head_gets_the_weights_of_its_checkpoint_together_with_the_model(headed: tuple[Path, Path]) -> None:
    old, new = headed
    wanted = fresh(new)
    with LLM(str(new), **SETTINGS, speculative_config=MTP) as llm:
        assert answers(llm) == wanted
        head = head_of(llm)
    with LLM(str(old), **SETTINGS, speculative_config=MTP) as llm:
        first, before = head_of(llm), answers(llm)
        assert not same(first, head)
        for _ in range(2):
            llm.update_weights_from_disk(new)
            assert answers(llm) == wanted
            assert same(head_of(llm), head)
            assert not state(llm).has_old_drafter
            llm.sleep(level=2)
            llm.wake_up()
            llm.reload_weights()
            assert answers(llm) == before
            assert same(head_of(llm), first)
            llm.load_weights(iter(load_file(new / "model.safetensors").items()))
            assert answers(llm) == wanted
            assert same(head_of(llm), head)


def test_an_mtp_head_without_new_weights_is_named_as_old_and_changes_no_token(headed: tuple[Path, Path]) -> None:
    old, new = headed
    wanted, tensors = fresh(new), load_file(new / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.3.")}
    with LLM(str(old), **SETTINGS, speculative_config=MTP) as llm:
        head = head_of(llm)
        llm.load_weights(own.items())
        assert state(llm).has_old_drafter
        assert answers(llm) == wanted
        assert same(head_of(llm), head)
        llm.load_weights([(name, tensor) for name, tensor in tensors.items() if name not in own])  # the head alone
        assert not state(llm).has_old_drafter
        assert not same(head_of(llm), head)
        assert answers(llm) == wanted
        with pytest.raises(InvalidRequest, match="only be replaced together"):
            llm.load_weights([(name, tensors[name]) for name in tensors if name.endswith("3.self_attn.q_proj.weight")])
        with pytest.raises(InvalidRequest, match="has shape"):
            llm.load_weights([("model.layers.3.enorm.weight", torch.ones(3))])
        assert answers(llm) == wanted
    with LLM(str(old), **SETTINGS) as llm, pytest.raises(InvalidRequest, match="no tensor that this model reads"):
        llm.load_weights([("model.layers.3.enorm.weight", torch.ones(64))])


def test_a_draft_model_stays_and_is_named_as_old_until_the_own_files_are_loaded(pair: Pair, tmp_path: Path) -> None:
    draft = FamilyCase("llama", tmp_path / "draft", {"num_hidden_layers": 1})
    assert draft.model is not None
    settings = {"speculative_config": {"model": str(draft.directory), "num_speculative_tokens": 2}}
    wanted = fresh(pair.new.directory)
    with LLM(str(pair.old.directory), **SETTINGS | settings) as llm:
        before = answers(llm)
        llm.load_weights(pair.tensors().items())
        assert answers(llm) == wanted
        assert state(llm).has_old_drafter
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights()
        assert not state(llm).has_old_drafter
        assert answers(llm) == before


# --------------------------------------------------------------------------------------- adapters, tiers, formats
def test_adapters_stay_and_their_cached_prompts_do_not(pair: Pair, tmp_path: Path) -> None:
    lora = LoRARequest("one", 1, str(make_adapter(tmp_path / "one", pair.old.model)))
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    wanted = [fresh(pair.new.directory, LONG, lora=each, **settings) for each in (lora, None)]
    with LLM(str(pair.old.directory), **SETTINGS | settings) as llm:
        assert answers(llm, LONG, lora_request=lora) != wanted[0]
        llm.load_weights(pair.tensors().items())
        assert [answers(llm, LONG, lora_request=each) for each in (lora, None)] == wanted
        assert [info.name for info in llm.list_loras()] == ["one"]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_no_block_of_old_weights_is_found_in_any_tier(pair: Pair, tmp_path: Path, tier: str) -> None:
    settings: dict[str, Any] = {"num_kv_blocks": 8, "host_cache_memory": "16MiB"}
    if tier == "disk":
        settings |= {"disk_cache_path": str(tmp_path / "blocks"), "disk_cache_memory": "64MiB"}
    wanted = fresh(pair.new.directory, LONG)
    with LLM(str(pair.old.directory), **SETTINGS | settings) as llm:
        before = answers(llm, LONG)
        evict(llm)
        hits = llm.stats().prefix_hits
        assert answers(llm, LONG) == before
        assert llm.stats().prefix_hits > hits, "the tier was not used"
        evict(llm)
        for _ in range(2):
            llm.load_weights(pair.tensors().items())
            hits = llm.stats().prefix_hits
            assert answers(llm, LONG) == wanted
            assert llm.stats().prefix_hits == hits
            evict(llm)
            assert answers(llm, LONG) == wanted
            evict(llm)
        llm.reload_weights()
        assert answers(llm, LONG) == before
    with LLM(str(pair.new.directory), **SETTINGS | settings) as llm:  # the folder holds blocks of the other weights
        assert answers(llm, LONG) == wanted


def evict(llm: LLM) -> None:
    """Let other prompts take all blocks of the device."""
    for token in (1, 2, 3):
        answers(llm, [token] * 100)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_weights_are_quantized_again(pair: Pair, quantization: str) -> None:
    wanted = fresh(pair.new.directory, quantization=quantization)
    with LLM(str(pair.old.directory), **SETTINGS, quantization=quantization) as llm:
        assert answers(llm) != wanted
        llm.load_weights(pair.tensors().items())
        assert answers(llm) == wanted


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_model_takes_a_gguf_file_and_no_single_tensors(tmp_path: Path, kind: str) -> None:
    changes = {"hidden_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32, "v_head_dim": 32}
    files = []
    for name, seed in (("old", 0), ("new", 7)):
        case = FamilyCase("deepseek_v2", tmp_path / name, changes)
        randomize(case.model, seed=seed)
        case.model.save_pretrained(case.directory)  # type: ignore[operator]
        files.append(export_gguf(case.directory, tmp_path / f"{name}.gguf", kind))
    old, new = files
    wanted = fresh(new)
    with LLM(str(old), **SETTINGS) as llm:
        before = answers(llm)
        assert before != wanted
        with pytest.raises(InvalidRequest, match="GGUF"):
            llm.load_weights(case.model.state_dict().items())
        llm.update_weights_from_disk(new)
        assert answers(llm) == wanted
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights()
        assert answers(llm) == before


@pytest.mark.parametrize("name", ["mixtral", "granitemoe", "qwen3_next"])
def test_names_of_a_trained_module_that_its_files_do_not_have_are_taken(name: str, tmp_path: Path) -> None:
    """tests/families does this for all families."""
    pair = Pair(tmp_path, name)
    assert pair.tensors().keys() - load_file(pair.new.directory / "model.safetensors").keys()
    wanted = fresh(pair.new.directory)
    with LLM(str(pair.old.directory), **SETTINGS) as llm:
        assert answers(llm) != wanted
        llm.load_weights(pair.tensors().items())
        assert answers(llm) == wanted

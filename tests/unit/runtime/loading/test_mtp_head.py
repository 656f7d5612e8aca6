"""Multi-token-prediction heads in the files of their models: found, planned for, loaded, or refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from family_models import FamilyCase
from mtp_heads import MtpCase
from quire.config.arguments import EngineArguments
from quire.config.fields import Fields
from quire.config.speculation import MTP_NAMES, read_speculation
from quire.runtime.hardware import detect_hardware
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import ModelFiles, files_at
from quire.runtime.loading.hf.config import _unfold
from quire.runtime.loading.hf.mtp import has_head
from quire.runtime.loading.model_config import read_model_config
from quire.runtime.models.build import count_weights
from quire.runtime.models.mtp import HEADS, head_config
from quire.runtime.models.registry import CLASSES, MTP, WITH_MTP, find_family
from quire.serving.assembly import plan_engine
from quire.serving.cli.doctor import _plan
from quire.types.errors import ConfigError, ModelLoadError
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from released_mixtures import MIXTURES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("model") / "deepseek"
    MtpCase(FamilyCase("deepseek_v3", found)).save()
    return found


def arguments(**changes: Any) -> EngineArguments:
    return EngineArguments(
        **{"dtype": "float32", "threads": 1, "kv_cache_memory": "4MiB", "max_model_len": 256, **changes}
    )


def answers(files: ModelFiles, speculative: dict[str, Any] | None) -> tuple[list[int], int]:
    """What an engine made of files says after three tokens, and how many tokens it drafted."""
    core = plan_engine(files, arguments(speculative_config=speculative)).build("auto", lambda *_: None)
    try:
        core.submit(Submit("a", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=20), TokenRules()))
        found: list[int] = []
        while core.has_work:
            found += core.step().token_ids.tolist()
        return found, core.stats().drafted_tokens
    finally:
        core.close()


def test_an_engine_drafts_with_the_head_of_its_model_and_says_the_same(folder: Path) -> None:
    files = files_at(folder)
    drafted, num_drafted = answers(files, {"method": "deepseek_mtp", "num_speculative_tokens": 2})
    assert (drafted, 0) == answers(files, None)
    assert num_drafted > 0


def test_the_memory_plan_counts_the_layer_of_the_head_and_a_hidden_state_of_each_token(folder: Path) -> None:
    files = files_at(folder)
    plain = plan_engine(files, arguments())
    drafting = plan_engine(files, arguments(speculative_config={"method": "mtp"}))
    speculation = drafting.config.speculation
    assert speculation is not None
    assert (speculation.method, speculation.num_tokens) == ("mtp", 3)
    head = speculation.draft
    assert head is not None
    assert head.num_layers == 1
    assert drafting.memory.draft > 4 * head.num_parameters
    own = 32 + 8 + 64  # numbers of the head's latent and of a hidden state, for each token
    assert drafting.memory.block_bytes == plain.memory.block_bytes + 16 * own * 4


def test_the_memory_plan_counts_what_a_rank_holds_of_the_head(folder: Path) -> None:
    """Some of its layers are whole on every rank, and others are shared."""
    settings = arguments(speculative_config={"method": "mtp"}, tensor_parallel_size=2)
    speculation = plan_engine(files_at(folder), settings).config.speculation
    assert speculation is not None
    assert speculation.draft is not None
    whole, weights = speculation.draft.num_parameters, speculation.draft.rank_weights
    assert weights is not None
    assert whole / 2 < weights.parameters < whole


def test_a_head_has_no_embeddings_no_output_head_and_no_dense_layer_of_its_own(folder: Path) -> None:
    files = ModelFiles("model", folder, "hf", is_head=True)
    head, target = read_model_config(files), read_model_config(files_at(folder))
    assert head.mtp is not None
    assert head.mtp.prefix == "model.layers.3."
    assert head.experts is not None
    assert target.experts is not None
    assert (head.experts.dense_layers, target.experts.dense_layers) == ((), (0,))
    assert head.num_parameters < target.num_parameters / 2


def test_a_head_has_the_indexer_that_its_layer_has_in_the_files(tmp_path: Path) -> None:
    MtpCase(FamilyCase("deepseek_v32", tmp_path)).save()
    files = ModelFiles("model", tmp_path, "hf", is_head=True)
    head = read_model_config(files)
    assert head.indexer is not None
    assert head.indexer.layers == (0,)
    open_checkpoint(files).close()
    tensors = load_file(tmp_path / "model.safetensors")
    left = {name: each for name, each in tensors.items() if ".3.self_attn.indexer." not in name}
    assert len(left) < len(tensors)
    save_file(left, tmp_path / "model.safetensors")
    assert read_model_config(files).indexer is None
    open_checkpoint(files).close()


def test_all_names_of_the_method_mean_the_models_own_head() -> None:
    for name in ("mtp", *MTP_NAMES):
        found = read_speculation({"method": name})
        assert found is not None
        assert found.method == "mtp"
    with pytest.raises(ConfigError, match="model: has no meaning with method 'mtp'"):
        read_speculation({"method": "mtp", "model": "other"})


def test_a_checkpoint_without_the_tensors_of_a_head_is_refused_by_their_prefix(folder: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if ".3." not in name}, tmp_path / "model.safetensors")
    assert has_head(folder, read_model_config(files_at(folder)))
    assert not has_head(tmp_path, read_model_config(files_at(tmp_path)))
    with pytest.raises(ConfigError, match=r"method: .*have no tensor model\.layers\.3\.\*"):
        plan_engine(files_at(tmp_path), arguments(speculative_config={"method": "mtp"}))


def test_the_log_of_a_start_names_a_head_that_nothing_uses(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_at(folder)
    advice = plan_engine(files, arguments()).advice
    assert advice is not None
    assert '{"method": "mtp"}' in advice
    assert plan_engine(files, arguments(pipeline_parallel_size=2)).advice == advice
    assert plan_engine(files, arguments(speculative_config={"method": "mtp"})).advice is None
    assert plan_engine(files, arguments(speculative_config={"method": "ngram"})).advice is None
    assert plan_engine(files, arguments(host_cache_memory="4MiB")).advice is None
    with caplog.at_level("INFO", "quire"):
        plan_engine(files, arguments()).build("auto", lambda *_: None).close()
    assert advice in caplog.text
    assert advice in _plan(files, arguments(), detect_hardware())  # of `quire doctor`


def test_the_registry_names_the_families_with_heads() -> None:
    assert {name.removesuffix(MTP) for name in HEADS} == WITH_MTP


def test_a_damaged_head_is_refused_by_the_tensor_that_is_missing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="eh_proj"):
        answers(files_at(tmp_path), {"method": "mtp"})


def test_embeddings_that_a_head_has_of_its_own_are_refused_and_further_heads_left_out(tmp_path: Path) -> None:
    MtpCase(FamilyCase("qwen3_next", tmp_path)).save()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {name: each.clone() for name, each in tensors.items() if name.startswith("mtp.layers.0.")}
    save_file(tensors | {name.replace("mtp.layers.0.", "mtp.layers.1."): each for name, each in more.items()}, file)
    checkpoint = open_checkpoint(replace(files_at(tmp_path), is_head=True))
    assert not any(name.startswith("layers.1.") for name in checkpoint.names)
    checkpoint.close()
    save_file(tensors | {"mtp.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight: has no place"):
        open_checkpoint(replace(files_at(tmp_path), is_head=True))


@pytest.mark.parametrize(
    ("name", "prefix", "billions"),
    [
        ("DeepSeek-R1", "model.layers.61.", 11.5),  # as its README says: without embeddings and output head
        ("GLM-4.5-Air", "model.layers.46.", 2.4),
        ("Qwen3-Next-80B-A3B", "mtp.", 1.7),
        ("Qwen3.5-4B", "mtp.", 0.12),
    ],
)
def test_released_models_have_heads_of_one_layer(name: str, prefix: str, billions: float) -> None:
    config = Fields("config.json", MIXTURES[name])
    family = find_family(CLASSES[MIXTURES[name]["architectures"][0]])
    head = count_weights(head_config(family.read(_unfold(config, family.nested))))
    assert head.mtp is not None
    assert (head.mtp.prefix, head.num_layers, head.recurrent, head.vision) == (prefix, 1, None, None)
    assert head.num_parameters == pytest.approx(billions * 1e9, rel=0.1)


def test_models_whose_heads_are_not_known_are_refused_by_family(tmp_path: Path) -> None:
    case = FamilyCase("llama", tmp_path)
    assert case.model is not None
    with pytest.raises(ConfigError, match=r"llama models have none that is supported.*deepseek_v3"):
        plan_engine(files_at(tmp_path), arguments(speculative_config={"method": "mtp"}))


def test_a_qwen_within_a_model_for_images_drafts_with_its_head(tmp_path: Path) -> None:
    case = MtpCase(FamilyCase("qwen3_5_text", tmp_path))
    case.save()
    told = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": told}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": told["tie_word_embeddings"]}))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name if name.startswith("mtp.") else f"model.language_model.{name.removeprefix('model.')}": each
        for name, each in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    drafted, num_drafted = answers(files_at(tmp_path), {"method": "qwen3_5_mtp"})
    assert (drafted, 0) == answers(files_at(tmp_path), None)
    assert num_drafted > 0


def in_blocks(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix in float8, and the scale of each block of `size` by `size`."""
    rows, columns = (-(-length // size) * size for length in tensor.shape)
    padded = torch.zeros(rows, columns)
    padded[: len(tensor), : tensor.shape[1]] = tensor
    scales = padded.view(rows // size, size, columns // size, size).abs().amax(dim=(1, 3)) / 448
    spread = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[: len(tensor), : tensor.shape[1]]
    return (tensor / spread).to(torch.float8_e4m3fn), scales


def test_the_head_of_a_checkpoint_in_blocks_of_float8_is_read_as_stored(tmp_path: Path) -> None:
    case = MtpCase(FamilyCase("deepseek_v3", tmp_path), knows=True)
    case.save()
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if tensor.dim() == 2 and ".layers." in name and not re.search("gate.weight|embed|head|kv_b|kv_a", name):
            stored[name], stored[f"{name}_scale_inv"] = in_blocks(tensor, 128)
        else:
            stored[name] = tensor
    assert stored["model.layers.3.eh_proj.weight"].dtype == torch.float8_e4m3fn
    save_file(stored, tmp_path / "model.safetensors")
    told = json.loads((tmp_path / "config.json").read_text())
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(told | {"quantization_config": scheme}))
    plan = plan_engine(files_at(tmp_path), arguments(speculative_config={"method": "mtp"}))
    assert plan.config.speculation is not None
    assert plan.config.speculation.draft is not None
    assert plan.config.speculation.draft.levels.gpu_parameters > 0
    drafted, num_drafted = answers(files_at(tmp_path), {"method": "mtp"})
    assert (drafted, 0) == answers(files_at(tmp_path), None)
    assert num_drafted > 0

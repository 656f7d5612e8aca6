"""The hidden states of every family of encoders, in batches of mixed lengths, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from encoder_models import (
    CONFIGS,
    NO_HEADS,
    TEXTS,
    expected_states,
    hf_classifier,
    hf_encoder,
    hidden_states,
    load_classifier,
    load_encoder,
)
from family_bench import BACKENDS, change_config
from quire.runtime.loading.files import files_at
from quire.runtime.loading.model_config import read_model_config
from quire.runtime.models.registry import of_kind
from quire.runtime.models.rotary_bert import NOMIC_KEYS
from quire.types.errors import ModelLoadError

pytest.importorskip("transformers")
HEADED = sorted(CONFIGS.keys() - set(NO_HEADS))


def test_every_encoder_has_a_tiny_model() -> None:
    assert CONFIGS.keys() == set(of_kind("encoder"))
    assert {f"{name}-classifier" for name in HEADED} == set(of_kind("classifier"))


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("family", HEADED)
def test_logits_of_texts_and_pairs_are_those_of_transformers(family: str, num_labels: int, tmp_path: Path) -> None:
    model = hf_classifier(family, num_labels)
    model.save_pretrained(tmp_path)
    firsts = [4, 3, 1, 2, 50]  # of the last text, every token
    found: dict[int, torch.Tensor] = {}
    for batch, rows in load_classifier(tmp_path).run(TEXTS, first_parts=firsts):
        found.update(zip(batch, rows, strict=True))
    has_types = CONFIGS[family].get("type_vocab_size", 0) > 1
    for number, (text, first) in enumerate(zip(TEXTS, firsts, strict=True)):
        types = {"token_type_ids": (torch.arange(len(text)) >= first).long()[None]} if has_types else {}
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([list(text)]), **types).logits[0]
        torch.testing.assert_close(found[number], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_tokens", [64, 1_000])  # several batches, or one
@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_hidden_states_are_those_of_transformers(family: str, kernels: str, max_tokens: int, tmp_path: Path) -> None:
    model = hf_encoder(family)
    model.save_pretrained(tmp_path)
    states = hidden_states(load_encoder(tmp_path, max_tokens=max_tokens, kernels=kernels), TEXTS)
    for text, found in zip(TEXTS, states, strict=True):
        torch.testing.assert_close(found, expected_states(model, list(text)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_bfloat16_is_near(family: str, tmp_path: Path) -> None:
    model = hf_encoder(family)
    model.save_pretrained(tmp_path)
    states = hidden_states(load_encoder(tmp_path, dtype="bfloat16"), TEXTS)
    for text, found in zip(TEXTS, states, strict=True):
        wanted = expected_states(model, list(text))
        assert torch.nn.functional.cosine_similarity(found, wanted).min() > 0.995


@pytest.mark.parametrize("family", HEADED)
def test_a_checkpoint_with_the_head_of_its_training_is_read_without_it(family: str, tmp_path: Path) -> None:
    import transformers

    model = hf_encoder(family)
    whole = transformers.AutoModelForMaskedLM.from_config(model.config, dtype=torch.float32).eval()
    getattr(whole, whole.base_model_prefix).load_state_dict(model.state_dict(), strict=False)
    whole.save_pretrained(tmp_path)
    (found,) = hidden_states(load_encoder(tmp_path), TEXTS[:1])
    torch.testing.assert_close(found, expected_states(model, list(TEXTS[0])), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_modernbert_may_have_biases_and_classify_by_the_mean(pooling: str, tmp_path: Path) -> None:
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
    model = hf_classifier(
        "modernbert", 3, **biases, classifier_pooling=pooling, classifier_activation="silu", local_attention=10,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    for batch, rows in load_classifier(tmp_path).run(TEXTS):
        for number, found in zip(batch, rows, strict=True):
            with torch.no_grad():
                wanted = model(input_ids=torch.tensor([list(TEXTS[number])])).logits[0]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_nomic_is_read_in_the_spelling_of_its_own_code(tmp_path: Path) -> None:
    model = hf_encoder("nomic_bert")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    named = {key: config.pop(key) for key in NOMIC_KEYS if key in config} | {"rope_theta": 1000}
    config.pop("rope_parameters")
    config |= {NOMIC_KEYS[key]: value for key, value in named.items()} | {"activation_function": "swiglu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (found,) = hidden_states(load_encoder(tmp_path), TEXTS[:1])
    torch.testing.assert_close(found, expected_states(model, list(TEXTS[0])), rtol=1e-4, atol=1e-4)
    change_config(tmp_path, rotary_scaling_factor=2, max_trained_positions=32)
    assert read_model_config(files_at(tmp_path)).rope.max_position == 32


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers: only 0 is supported"),
        ("nomic_bert", {"prenorm": True}, "prenorm: only false"),
        ("nomic_bert", {"last_layer_subset": True}, "last_layer_subset: only false"),
        ("nomic_bert", {"scale_attn_weights": False}, "scale_attn_weights: only true"),
        ("modernbert", {"is_decoder": True}, "is_decoder: only false"),
        ("modernbert", {"is_causal": True}, "is_causal: only false"),
        ("nomic_bert", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic is not supported in enc"),
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups: is 2, only 1 is supported"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets: only 32"),
    ],
)
def test_a_setting_that_only_one_family_has_is_refused(
    family: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    hf_encoder(family).save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=words):
        read_model_config(files_at(tmp_path))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    model = hf_encoder("bert")
    model.save_pretrained(tmp_path)
    change_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"layers\.3\.\S+: is missing from the checkpoint"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "'relative_key' is not supported"),
        ({"is_decoder": True}, "is_decoder: only false"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification is not supported"),
    ],
)
def test_a_setting_that_is_not_supported_is_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    hf_encoder("bert").save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=words):
        read_model_config(files_at(tmp_path))

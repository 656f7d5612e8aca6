"""The tables of limits and parameters, and what is made from them."""

from __future__ import annotations

import json
import re
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire.serving.http import fields as fields_module
from quire.serving.http.endpoints.app import _admin_routes
from quire.serving.http.endpoints.reference import write_reference
from quire.serving.http.endpoints.registry import BY_NAME
from quire.serving.http.endpoints.registry import ENDPOINTS as ENDPOINT_TABLE
from quire.serving.http.fields import Field
from quire.serving.http.fields import check_body as check_fields
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.limits import LIMITS, Limits
from quire.serving.http.openapi import build_openapi
from quire.serving.http.validators.values import Only, Options
from quire.types.errors import ConfigError, InvalidRequest
from quire.types.extra_samplers import ExtraSamplers
from quire.types.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[4]
ENDPOINTS = tuple(name for name, endpoint in BY_NAME.items() if endpoint.fields)
SMALLEST: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "fork": {"request_id": "x"},
    "responses": {"input": "x"},
    "embeddings": {"input": "x"},
    "pooling": {"input": "x"},
    "classify": {"input": "x"},
    "score": {"text_1": "x", "text_2": "y"},
    "generative_scoring": {"query": "x", "items": ["y"], "label_token_ids": [1]},
    "rerank": {"query": "x", "documents": ["y"]},
    "ollama_embed": {"input": "x"},
    "ollama_embeddings": {"prompt": "x"},
    "llama_embedding": {"content": "x"},
    "tei_embed": {"inputs": "x"},
    "tei_similarity": {"inputs": {"source_sentence": "x", "sentences": ["y"]}},
    "tei_predict": {"inputs": "x"},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [1]},
    "messages": {"messages": [{"role": "user", "content": "x"}]},
    "count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "ollama_chat": {"messages": [{"role": "user", "content": "x"}]},
    "ollama_generate": {"prompt": "x"},
    "ollama_show": {"model": "x"},
    "ollama_pull": {"model": "x"},
    "chat_batch": {"messages": [[{"role": "user", "content": "x"}]]},
    "generate": {"token_ids": [1]},
    "sglang_generate": {"text": "x"},
    "tgi_generate": {"inputs": "x"},
    "tgi_generate_stream": {"inputs": "x"},
    "chat_render": {"messages": [{"role": "user", "content": "x"}]},
    "completions_render": {"prompt": "x"},
    "chat_input_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "responses_input_tokens": {"input": "x"},
    "llama_completion": {"prompt": "x"},
    "llama_infill": {"input_prefix": "x", "input_suffix": "y"},
    "llama_apply_template": {"messages": [{"role": "user", "content": "x"}]},
    "batches_create": {"input_file_id": "x", "endpoint": "/v1/chat/completions"},
}


def fields_of(endpoint: str) -> dict[str, Field]:
    return BY_NAME[endpoint].fields_by_name


def check_body(endpoint: str, body: Any, limits: Limits, *, strict: bool) -> tuple[dict[str, Any], list[str]]:
    return check_fields(fields_of(endpoint), body, limits, strict=strict)


def test_the_reference_page_is_what_the_tables_say() -> None:
    page = (ROOT / "docs/reference/http_api.md").read_text(encoding="utf-8")
    assert page == write_reference(), (
        "run: python -m quire.serving.http.endpoints.reference > docs/reference/http_api.md"
    )


def test_the_reference_page_has_every_route() -> None:
    page = re.sub(r"\{\w+\}", "{}", write_reference())
    admin = _admin_routes(Mock(), Mock(), Mock())
    routes = {(endpoint.method, endpoint.documented_path): bool(endpoint.fields) for endpoint in ENDPOINT_TABLE}
    assert len(routes) > 40
    for (method, path), has_section in (routes | dict.fromkeys(admin, False)).items():
        route = f"{method} {re.sub(r'{[^}]*}', '{}', path)}"
        assert (f"## {route}\n" if has_section else f"`{route}`") in page, route


def test_names_are_unique() -> None:
    assert len({limit.name for limit in LIMITS}) == len(LIMITS)
    for endpoint in ENDPOINTS:
        names = [field.name for field in BY_NAME[endpoint].fields]
        assert len(set(names)) == len(names)


def test_every_default_passes_its_own_check() -> None:
    limits = Limits()
    given = [field for name in ENDPOINTS for field in BY_NAME[name].fields if field.default is not None]
    assert given
    for field in given:
        assert field.validator.check(field.name, field.default, limits) == field.default


def test_defaults_agree_with_the_engines() -> None:
    engine = SamplingParams()
    names = {field.name for field in dataclass_fields(SamplingParams)} - {"logprobs", "prompt_logprobs"}
    for field in fields_of("completions").values():
        if field.name in names and field.default is not None:
            assert getattr(engine, field.name) == field.default, field.name


def test_every_sampling_parameter_of_the_engine_can_be_asked_for() -> None:
    offered = set(fields_of("completions"))
    internal = {"detokenize", "output_kind", "extra"}  # of the Python API
    assert {field.name for field in dataclass_fields(SamplingParams)} - internal <= offered
    for name, default in ((field.name, field.default) for field in dataclass_fields(ExtraSamplers)):
        shown = fields_of("completions")[name].default
        assert shown == default or (name, shown) == ("dry_sequence_breakers", None)


def test_the_highest_values_pass_the_engines_own_checks() -> None:
    limits = Limits({limit.name: limit.highest for limit in LIMITS})
    sampling = {one.name for one in dataclass_fields(SamplingParams)} - {"max_tokens", "min_tokens"}
    highest = {name: field.validator.schema(limits).get("maximum") for name, field in fields_of("completions").items()}
    bounded = {name: value for name, value in highest.items() if name in sampling and value is not None}
    assert {"n", "temperature", "top_p", "logprobs"} <= set(bounded)
    for name, value in bounded.items():
        needed = {"prompt_logprobs": 0} if name == "prompt_logprobs_start" else {}
        assert getattr(SamplingParams(**needed, **{name: value}), name) == value


@pytest.mark.parametrize("change", [{"nonsense": 1}, {"n": 0}, {"n": 2**40}, {"n": True}, {"n": "5"}])
def test_a_limit_that_cannot_be_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        Limits(change)


def test_a_limit_can_be_changed() -> None:
    assert Limits({"n": 4})["n"] == 4
    with pytest.raises(InvalidRequest, match="n: must be in \\[1, 4\\]"):
        check_body("completions", {"prompt": "x", "n": 5}, Limits({"n": 4}), strict=True)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_not_supported_passes_only_where_it_asks_for_nothing(endpoint: str) -> None:
    limits = Limits()
    for field in fields_of(endpoint).values():
        if not isinstance(field.validator, Only):
            continue
        for harmless in field.validator.harmless:
            checked, _ = check_body(endpoint, {**SMALLEST[endpoint], field.name: harmless}, limits, strict=True)
            assert field.name not in checked
        with pytest.raises(InvalidRequest, match=field.name):
            check_body(endpoint, {**SMALLEST[endpoint], field.name: {"some": "thing"}}, limits, strict=True)
        body = {**SMALLEST[endpoint], field.name: {"some": "thing"}}
        if field.support == "no":
            with pytest.raises(InvalidRequest, match=field.name):
                check_body(endpoint, body, limits, strict=False)
        else:
            checked, warnings = check_body(endpoint, body, limits, strict=False)
            assert (field.name in checked, warnings[0].startswith(field.name)) == (False, True)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_null_is_absent_for_every_parameter_but_the_required(endpoint: str) -> None:
    for field in fields_of(endpoint).values():
        if not field.is_required and field.name not in SMALLEST[endpoint]:
            body = {**SMALLEST[endpoint], field.name: None}
            assert field.name not in check_body(endpoint, body, Limits(), strict=True)[0]


def test_an_unknown_parameter_is_named_but_not_echoed_at_length() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_body("completions", {"prompt": "x", "q" * 5_000: 1}, Limits(), strict=True)
    assert len(str(caught.value)) < 300


def test_an_unknown_parameter_that_is_close_to_a_known_one_is_told_so() -> None:
    _, (warning,) = check_body("completions", {"prompt": "x", "temprature": 1}, Limits(), strict=False)
    assert warning == "temprature: is not a parameter of this endpoint; did you mean temperature?"


def test_extra_body_is_told_to_be_an_argument_of_a_client() -> None:
    _, (warning,) = check_body("completions", {"prompt": "x", "extra_body": {"top_k": 1}}, Limits(), strict=False)
    assert warning.endswith("argument of OpenAI's Python client; in JSON, put its members beside the other parameters")


def test_warnings_are_bounded() -> None:
    body = {"prompt": "x", **{f"unknown{number}": 1 for number in range(1_000)}}
    assert len(check_body("completions", body, Limits(), strict=False)[1]) == 64


def test_names_beyond_the_last_warning_are_not_compared_with_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body has room for 200,000 of them, and each comparison takes a tenth of a millisecond."""
    compared: list[str] = []
    monkeypatch.setattr(fields_module, "get_close_matches", lambda name, *_: compared.append(name) or [])
    body = {**{f"unknown{number}": 1 for number in range(1_000)}, "prompt": "x", "n": 2}
    assert check_body("completions", body, Limits(), strict=False)[0]["n"] == 2
    assert len(compared) == 64


@pytest.mark.parametrize("value", [1.0, 3])
def test_a_whole_number_may_be_written_with_a_point(value: float) -> None:
    checked, _ = check_body("completions", {"prompt": "x", "n": value}, Limits(), strict=True)
    assert checked["n"] == value
    assert isinstance(checked["n"], int)


def test_the_openapi_document_has_the_limits_in_force() -> None:
    document = json.loads(build_openapi(tuple(BY_NAME.values()), Limits({"n": 7}), "1"))
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["n"]["maximum"] == 7


def test_the_guide_names_the_endpoints_that_score_prompts() -> None:
    guide = (ROOT / "docs/guides/evaluation.md").read_text()
    named = set(re.findall(r"`(/v1/[a-z/]+)`", guide.partition("## Given continuations")[2].partition("## lm-eval")[0]))
    scoring = {
        endpoint.paths[0]
        for endpoint in ENDPOINT_TABLE
        if isinstance(endpoint, GenerationEndpoint)
        for field in endpoint.fields
        if field.name == "prompt_logprobs_start"
        or (isinstance(field.validator, Options) and "prompt_logprobs_start" in field.validator.members)
    }
    assert named == scoring

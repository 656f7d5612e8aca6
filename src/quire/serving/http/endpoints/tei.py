"""The API of Hugging Face's Text Embeddings Inference: /embed, /similarity and /predict, and at the root, where its
clients also send requests, whichever of them the body is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.config.embedding import PoolingModel
from quire.serving.http.endpoints.embeddings import DIMENSIONS
from quire.serving.http.endpoints.scoring import SCORING, TRUNCATE
from quire.serving.http.endpoints.tgi_format import write_error
from quire.serving.http.exchange import AsgiHandler, Exchange, Handler
from quire.serving.http.fields import MODEL, Field, not_supported
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.json_body import decode_json
from quire.serving.http.pooling.handler import PoolingCall, PoolingEndpoint, PoolingJob
from quire.serving.http.schemas import NUMBER, TEXT, Schema, many, record
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Prompts
from quire.serving.http.validators.text_lists import TextList
from quire.serving.http.validators.values import Bounds, Flag, Text, shown
from quire.serving.pooled_texts import PooledText, Rows, check_task, cosines
from quire.serving.requests import Prompt
from quire.types.errors import InvalidRequest
from quire.types.pooling import PoolingParams

_PAIR = ("source_sentence", "sentences")


@dataclass(frozen=True, slots=True)
class Comparison:
    """`{"source_sentence": text, "sentences": [text, ...]}`. Returns the texts, the source first."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[str]:
        if not isinstance(value, dict) or value.keys() != set(_PAIR):
            raise InvalidRequest(where, f"must be an object with {' and '.join(_PAIR)}, got {shown(value)}")
        source = Text("prompt_characters", 1).check(f"{where}.{_PAIR[0]}", value[_PAIR[0]], limits)
        return [source, *TextList().check(f"{where}.{_PAIR[1]}", value[_PAIR[1]], limits)]

    def schema(self, limits: Bounds) -> Schema:
        members = {_PAIR[0]: Text("prompt_characters", 1).schema(limits), _PAIR[1]: TextList().schema(limits)}
        return {"type": "object", "properties": members, "required": list(_PAIR), "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Labeled:
    """A text, or a list of lists of one text each. Returns the texts, and whether it was a list."""

    def check(self, where: str, value: Any, limits: Bounds) -> tuple[list[str], bool]:
        if isinstance(value, str):
            return TextList(or_one=True).check(where, value, limits), False
        if isinstance(value, list) and all(isinstance(one, list) and len(one) == 1 for one in value):
            return TextList().check(where, [one[0] for one in value], limits), True
        fix = "send a text, or [[text], [text]]; pairs are for /rerank and /score"
        raise InvalidRequest(where, f"must be a text, or a list of lists of one text, got {shown(value)}", fix)

    def schema(self, limits: Bounds) -> Schema:
        text = Text("prompt_characters", 1).schema(limits)
        one = {"type": "array", "items": text, "minItems": 1, "maxItems": 1}
        return {"anyOf": [text, {"type": "array", "items": one, "minItems": 1, "maxItems": limits["inputs"]}]}


def _read(call: PoolingCall, texts: Sequence[Prompt], where: str = "inputs") -> list[PooledText]:
    return call.reader.read(texts, where, -1 if call.given.get("truncate") else None)


def embed(call: PoolingCall) -> PoolingJob:
    check_task(call.reader.model, classifies=False)
    params = PoolingParams(call.given.get("dimensions"), normalize=call.given.get("normalize", True))
    call.reader.check_params(params)
    return PoolingJob(_read(call, call.given["inputs"]), params, lambda rows, _: rows.tolist())


def compare(call: PoolingCall) -> PoolingJob:
    check_task(call.reader.model, classifies=False)
    texts = _read(call, [Prompt(text=text) for text in call.given["inputs"]], "inputs.sentences")

    def write(rows: Rows, num_tokens: int) -> list[float]:  # noqa: ARG001
        return cosines(np.broadcast_to(rows[:1], rows[1:].shape), rows[1:])

    return PoolingJob(texts, PoolingParams(), write)


def predict(call: PoolingCall) -> PoolingJob:
    check_task(call.reader.model, classifies=True)
    given, is_list = call.given["inputs"]
    params = PoolingParams(activate=not call.given.get("raw_scores", False))
    classes = call.reader.model.settings.classes
    labels = () if classes is None else classes.labels

    def write(rows: Rows, num_tokens: int) -> list[Any]:  # noqa: ARG001
        named = [
            [{"score": row[place], "label": labels[place]} for place in sorted(range(len(row)), key=lambda i: -row[i])]
            for row in rows.tolist()
        ]
        return named if is_list else named[0]

    return PoolingJob(_read(call, [Prompt(text=text) for text in given]), params, write)


class RootEndpoint(GenerationEndpoint):
    """POST /: Text Generation Inference's generate, and for models that embed or classify, the endpoint of Text
    Embeddings Inference that the body belongs to."""

    def make_handler(self, service: Service) -> Handler:
        generate = super().make_handler(service)
        handlers = {one.name: AsgiHandler(one.make_handler(service), one.write_error) for one in (*TEI, _RERANK)}

        async def handle(exchange: Exchange) -> None:
            engine = service.dispatcher.known_engine
            if engine is None or engine.pooling is None:
                await generate(exchange)
                return
            with service.metered() as meter:
                body = await exchange.read_body(service.limits, meter.add)
                decoded = await service.in_thread_of(body, decode_json, body, service.limits["nesting"])
            name = _name_target(decoded, "tei_embed" if engine.pooling.task == "embed" else "tei_predict")
            await exchange.pass_on(handlers[name], body)

        return handle


def _name_target(body: Any, usual: str) -> str:
    if isinstance(body, dict) and body.get("query") is not None:
        return "rerank"
    is_comparison = isinstance(body, dict) and isinstance(body.get("inputs"), dict)
    return "tei_similarity" if is_comparison else usual


def info(service: Service, model: PoolingModel) -> dict[str, Any]:
    """Return the page about a model that embeds or classifies."""
    kind: dict[str, Any] = {"embedding": {"pooling": model.settings.pooling.kind}}
    if model.settings.classes is not None:
        kind = {"classifier": {"id2label": dict(enumerate(model.settings.classes.labels))}}
    names = {"model_id": service.names[0], "model_sha": None, "model_dtype": service.engine().dtype}
    sizes = {"max_input_length": model.max_model_len, "max_client_batch_size": service.limits["inputs"]}
    return {**names, "model_type": kind, **sizes, "router": "quire", "version": service.version}


def _endpoint(name: str, summary: str, fields: tuple[Field, ...], response: Schema, read: Any) -> PoolingEndpoint:
    shape = f"{name.title().replace('_', '')}Answer"
    return PoolingEndpoint(
        name=name,
        paths=(f"/{name.removeprefix('tei_')}",),
        summary=f"{summary}, by Text Embeddings Inference's API",
        fields=(MODEL, *fields, TRUNCATE, *_UNSUPPORTED),
        response=shape,
        schemas={shape: response},
        error="TgiError",
        write_error=write_error,
        id_prefix=name.removeprefix("tei_"),
        read=read,
    )


_UNSUPPORTED = (
    not_supported("truncation_direction", "The end that is cut off.", "Right", "right", why="can only be Right"),
    not_supported("prompt_name", "The name of an instruction.", why="is not read: write the instruction into the text"),
)
_INPUTS = Field("inputs", Prompts(count="inputs"), "A text, token ids, or a list of either.", is_required=True)
_CLASS = record({"score": NUMBER, "label": TEXT})
TEI: tuple[PoolingEndpoint, ...] = (
    _endpoint(
        "tei_embed",
        "Embed texts",
        (_INPUTS, Field("normalize", Flag(), "Scale embeddings to length 1.", True), DIMENSIONS),
        many(many(NUMBER)),
        embed,
    ),
    _endpoint(
        "tei_similarity",
        "Compare a text with others by the cosine of their embeddings",
        (Field("inputs", Comparison(), "`source_sentence`, a text, and `sentences`, a list.", is_required=True),),
        many(NUMBER),
        compare,
    ),
    _endpoint(
        "tei_predict",
        "Classify texts",
        (
            Field("inputs", Labeled(), "A text, or a list of lists of one text.", is_required=True),
            Field("raw_scores", Flag(), "Return logits instead of scores.", False),
        ),
        {"anyOf": [many(_CLASS), many(many(_CLASS))]},
        predict,
    ),
)
_RERANK = next(one for one in SCORING if one.name == "rerank")

"""/score, /rerank and /classify: similarity of texts, ranking of documents, and labels of texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.endpoints.embeddings import COMMON, list_schema, listing
from quire.serving.http.endpoints.label_scoring import LABEL_SCORING, ScoreEndpoint
from quire.serving.http.fields import Field, not_supported
from quire.serving.http.pooling.handler import PoolingCall, PoolingEndpoint, PoolingJob
from quire.serving.http.schemas import NUMBER, TEXT, WHOLE, Schema, many, or_null, record
from quire.serving.http.validators.text_lists import TextList
from quire.serving.http.validators.values import Flag, Text, Whole
from quire.serving.pooled_texts import PooledText, Rows, check_scores, check_task, cosines, pair_up
from quire.serving.requests import Prompt
from quire.types.errors import InvalidRequest
from quire.types.pooling import PoolingParams

_ACTIVATE = Field("use_activation", Flag(),
          "Apply the classifier's activation function, so that it returns scores or probabilities instead of logits.",
          True)  # fmt: skip
TRUNCATE = Field("truncate", Flag(), "Cut texts that are too long; otherwise they are refused.", False)
_GUIDE = "See [the guide](../guides/embeddings.md). "
OF_TEI = ("texts", "truncate", "raw_scores", "return_text")  # fields of Text Embeddings Inference's /rerank
_OF_JINA = ("documents", "top_n", "return_documents", "truncate_prompt_tokens", "use_activation")


def _params(call: PoolingCall) -> PoolingParams:
    """Return the pooling parameters. Raises InvalidRequest for parameters that the model does not take."""
    params = PoolingParams(activate=call.given.get("use_activation", True))
    call.reader.check_params(params, "use_activation")
    return params


def check_ranking(given: dict[str, Any]) -> None:
    """Raise InvalidRequest unless there is one list of texts to rank, with the fields of its API only."""
    if "documents" not in given and "texts" not in given:
        raise InvalidRequest("documents", "is missing", "send a list of texts")
    mine, others = ("documents", OF_TEI) if "documents" in given else ("texts", _OF_JINA)
    for name in others:
        if name in given:
            raise InvalidRequest(name, f"cannot be used together with {mine}", "leave it out")


def _pairs(call: PoolingCall, first: list[str], second: list[str], names: tuple[str, str]) -> list[PooledText]:
    """Return the texts to compute to score each pair: the joined pairs for a cross-encoder, both sides otherwise."""
    reader, cut = call.reader, call.given.get("truncate_prompt_tokens")
    check_scores(reader.model)
    _check_characters(call, first, second, names)
    if reader.model.task == "classify":
        return reader.pairs(pair_up(first, second), second, names[1], cut)
    sides = ((first, names[0]), (second, names[1]))
    return [
        text for side, where in sides for text in reader.read([Prompt(text=one) for one in side], where, cut)
    ]  # fmt: skip


def _check_characters(call: PoolingCall, first: list[str], second: list[str], names: tuple[str, str]) -> None:
    """Raise InvalidRequest if both sides together have too many characters; each was checked alone before. For a
    decoder that answers yes or no, the first text counts once per pair, because every prompt contains it."""
    is_asked = call.reader.model.settings.answers is not None
    tokenized = pair_up(first, second) if is_asked else first
    total, limit = sum(map(len, (*tokenized, *second))), call.limits["prompt_characters"]
    if total > limit:
        how = " in each pair" if is_asked else ""
        reason = f"has, together with {names[0]}{how}, {total} characters in all, limit {limit}"
        raise InvalidRequest(names[1], reason, "send less at once")


def _scores(call: PoolingCall, rows: Rows, num_pairs: int) -> list[float]:
    """Return the score of each pair: a classifier's first logit or score, or the cosine of two embeddings."""
    if call.reader.model.task == "classify":
        found: list[float] = rows[:, 0].tolist()
        return found
    first, second = rows[: len(rows) - num_pairs], rows[len(rows) - num_pairs :]
    return cosines(np.broadcast_to(first, second.shape), second)


def score(call: PoolingCall) -> PoolingJob:
    first, second = call.given["text_1"], call.given["text_2"]
    pair_up(first, second)
    texts = _pairs(call, first, second, ("text_1", "text_2"))

    def write(rows: Rows, num_tokens: int) -> dict[str, Any]:
        scores = _scores(call, rows, len(second))
        data = [{"object": "score", "index": place, "score": one} for place, one in enumerate(scores)]
        return listing(call, data, num_tokens)

    return PoolingJob(texts, _params(call), write)


def rerank(call: PoolingCall) -> PoolingJob:
    check_ranking(call.given)
    if "texts" in call.given:
        return _rank_for_tei(call)
    given, documents = call.given, call.given["documents"]
    texts = _pairs(call, [given["query"]], documents, ("query", "documents"))
    most, shows = given.get("top_n") or len(documents), given.get("return_documents", True)

    def write(rows: Rows, num_tokens: int) -> dict[str, Any]:
        scores = _scores(call, rows, len(documents))
        ranked = sorted(range(len(documents)), key=lambda place: -scores[place])[:most]
        results = [
            {
                "index": place,
                **({"document": {"text": documents[place]}} if shows else {}),
                "relevance_score": scores[place],
            }
            for place in ranked
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"id": call.response_id, "model": call.name, "usage": usage, "results": results}

    return PoolingJob(texts, _params(call), write)


def _rank_for_tei(call: PoolingCall) -> PoolingJob:
    """Rank `texts`. The response is the list that Text Embeddings Inference returns."""
    given, documents = call.given, call.given["texts"]
    if given.get("truncate"):
        given["truncate_prompt_tokens"] = -1
    texts = _pairs(call, [given["query"]], documents, ("query", "texts"))
    params = PoolingParams(activate=not given.get("raw_scores", False))
    call.reader.check_params(params, "raw_scores")

    def write(rows: Rows, num_tokens: int) -> list[dict[str, Any]]:  # noqa: ARG001
        scores = _scores(call, rows, len(documents))
        shown = {"text": documents} if given.get("return_text") else {}
        return [
            {"index": place, "score": scores[place], **{name: texts[place] for name, texts in shown.items()}}
            for place in sorted(range(len(documents)), key=lambda place: -scores[place])
        ]

    return PoolingJob(texts, params, write)


def classify(call: PoolingCall) -> PoolingJob:
    check_task(call.reader.model, classifies=True)
    prompts = [Prompt(text=text) for text in call.given["input"]]
    texts = call.reader.read(prompts, "input", call.given.get("truncate_prompt_tokens"))
    classes = call.reader.model.settings.classes
    labels = () if classes is None else classes.labels

    def write(rows: Rows, num_tokens: int) -> dict[str, Any]:
        data = [
            {"index": place, "label": labels[best], "probs": probs, "num_classes": len(probs)}
            for place, (best, probs) in enumerate(zip(rows.argmax(axis=1).tolist(), rows.tolist(), strict=True))
        ]
        return listing(call, data, num_tokens)

    return PoolingJob(texts, _params(call), write)


_SCORE_SCHEMAS: dict[str, Schema] = {
    "Scores": list_schema("Score"),
    "Score": record({"object": {"const": "score"}, "index": WHOLE, "score": NUMBER}),
}
_RANKED = record(
    {
        "id": TEXT,
        "model": TEXT,
        "usage": record({"prompt_tokens": WHOLE, "total_tokens": WHOLE}),
        "results": many(record({"index": WHOLE, "relevance_score": NUMBER}, {"document": record({"text": TEXT})})),
    }
)
_RERANK_SCHEMAS: dict[str, Schema] = {
    "Ranking": {"anyOf": [_RANKED, many(record({"index": WHOLE, "score": NUMBER}, {"text": TEXT}))]}
}
_CLASS_SCHEMAS: dict[str, Schema] = {
    "Classes": list_schema("Class"),
    "Class": record({"index": WHOLE, "label": or_null(TEXT), "probs": many(NUMBER), "num_classes": WHOLE}),
}
SCORING: tuple[Endpoint, ...] = (
    ScoreEndpoint(
        name="score",
        paths=("/score", "/v1/score"),
        summary="Score pairs of texts",
        fields=(
            *COMMON,
            Field("text_1", TextList(or_one=True), "One text, or as many as in `text_2`.", is_required=True),
            Field("text_2", TextList(or_one=True), "The texts to compare with `text_1`.", is_required=True),
            _ACTIVATE,
        ),
        response="Scores",
        schemas=_SCORE_SCHEMAS,
        description=_GUIDE + "A cross-encoder reads both texts at once; with an encoder, it is the cosine of "
        "embeddings. "
        "A model that generates text scores label tokens instead, with the fields of `/generative_scoring`.",
        id_prefix="score",
        read=score,
    ),
    LABEL_SCORING,
    PoolingEndpoint(
        name="rerank",
        paths=("/rerank", "/v1/rerank", "/v2/rerank"),
        summary="Sort documents by how well they answer a query",
        fields=(
            *COMMON,
            Field("query", Text("prompt_characters", 1), "The query.", is_required=True),
            Field("documents", TextList(or_objects=True), "Texts, or objects with `text`."),
            Field("top_n", Whole(0, "inputs"), "Return only this many of the best documents; 0: all.", 0),
            Field("return_documents", Flag(), "Return the texts too.", True),
            not_supported(
                "max_tokens_per_doc", "Cutting documents.", why="is not supported: use truncate_prompt_tokens"
            ),
            not_supported("rank_fields", "Fields of documents to rank by.", why="is not supported: send texts"),
            _ACTIVATE,
            Field("texts", TextList(), "Text Embeddings Inference's name of `documents`."),
            TRUNCATE,
            Field("raw_scores", Flag(), "With `texts`: return logits instead of scores.", False),
            Field("return_text", Flag(), "With `texts`: return the texts too.", False),
        ),
        response="Ranking",
        schemas=_RERANK_SCHEMAS,
        description=_GUIDE + "Takes the requests of Jina's and Cohere's APIs, with `documents`, and those of Text "
        "Embeddings Inference, with `texts`, for which the answer is a list of `index` and `score`.",
        id_prefix="rerank",
        read=rerank,
    ),
    PoolingEndpoint(
        name="classify",
        paths=("/classify", "/v1/classify"),
        summary="Classify texts",
        fields=(
            *COMMON,
            Field("input", TextList(or_one=True), "A text or a list of them.", is_required=True),
            _ACTIVATE,
        ),
        response="Classes",
        schemas=_CLASS_SCHEMAS,
        description=_GUIDE + "Needs a classifier.",
        id_prefix="classify",
        read=classify,
    ),
)

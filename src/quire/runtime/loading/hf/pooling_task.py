"""Decides whether a model pools texts (embeds, classifies, scores) instead of generating, from its files and the
task."""

from __future__ import annotations

from quire.config.embedding import TASKS, Classes, EmbeddingSettings, Pooling
from quire.config.fields import Fields
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.hf.config import CONFIG
from quire.runtime.loading.hf.json_file import read_json
from quire.runtime.loading.hf.sentence import MODULES, read_embedding_settings, read_modules
from quire.runtime.loading.model_config import read_family, read_gguf_pooling
from quire.runtime.models.registry import ENTRIES, describe
from quire.types.errors import ConfigError

ANSWERS = ("no", "yes")
_BY_TOKENS = "classifier_from_token"  # key of config.json (vLLM's spelling): the words for no and yes
_LOGIT_SCORE = "LogitScore"  # a sentence-transformers module


def read_pooling_settings(files: ModelFiles, task: str) -> EmbeddingSettings | None:
    """Return what a model computes from texts, or None if it generates text. A decoder generates unless the task or its
    files specify otherwise: sentence-transformers' files, `classifier_from_token` in config.json, or `pooling_type` in
    a GGUF file.

    Raises ConfigError for a task that the model does not support.
    """
    if task not in TASKS:
        raise ConfigError("task", f"{task!r} is unknown", f"choose one of {', '.join(TASKS)}")
    family = read_family(files)
    if ENTRIES[family].kind != "decoder":
        settings = read_embedding_settings(files)
        _check_task(task, settings.classes, family)
        return settings
    if task == "generate":
        return None
    if task == "classify":
        reason = "'classify' needs labels, and this model has none"
        raise ConfigError("task", reason, 'use "embed" or "score", or a model such as LlamaForSequenceClassification')
    answers = _read_answers(files)
    if task == "score" or (task in ("auto", "pooling") and answers is not None):
        return EmbeddingSettings(Pooling("last"), classes=Classes(("yes",), "sigmoid"), answers=answers or ANSWERS)
    embeds = (files.path / MODULES).is_file() if files.kind == "hf" else read_gguf_pooling(files) is not None
    return read_embedding_settings(files) if task != "auto" or embeds else None


def _check_task(task: str, classes: Classes | None, family: str) -> None:
    """Refuse a task that a model without text generation does not support. The score of two embeddings is their
    cosine."""
    does = ("embed", "score") if classes is None else ("classify", "score")[: 2 if len(classes.labels) == 1 else 1]
    if task not in ("auto", "pooling", *does):
        fix = f'leave it out, or use "{does[0]}"'
        if task == "generate":
            raise ConfigError(
                "task", f"'generate' is for models that generate text, and this one {describe(family)}", fix
            )
        raise ConfigError("task", f"{task!r} is not what this model does", fix)


def _read_answers(files: ModelFiles) -> tuple[int | str, int | str] | None:
    """Return the tokens for no and yes that a reranker's files name, or None."""
    if files.kind != "hf":
        return None
    path = files.path / CONFIG
    config = Fields(str(path), read_json(path))
    named = config.raw(_BY_TOKENS)
    if named is not None:
        if not isinstance(named, list) or len(named) != len(ANSWERS) or not all(isinstance(one, str) for one in named):
            raise config.refuse(_BY_TOKENS, "must be two words, for no and for yes")
        return named[0], named[1]
    folder = dict(read_modules(files.path)).get(_LOGIT_SCORE) if (files.path / MODULES).is_file() else None
    if folder is None:
        return None
    path = files.path / folder / CONFIG
    config = Fields(str(path), read_json(path))
    return config.integer("false_token_id"), config.integer("true_token_id")

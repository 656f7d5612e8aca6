"""lm-eval over `/v1/completions`: it scores continuations by echoing prompts with logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from http_server import TestServer
from tests.http.conftest import Serve, serve

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")
__all__ = ["serve"]


class Instance:
    """What lm-eval's request objects have."""

    def __init__(self, *arguments: Any) -> None:
        self.args = arguments


def model(server: TestServer, **options: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    path = f"{server.url}/v1/completions"
    return LocalCompletionsAPI(model="scripted", base_url=path, tokenizer_backend="remote", **options)


def test_continuations_are_scored_by_the_logprobs_of_the_echoed_prompt(serve: Serve) -> None:
    """The scripted model gives every token a logprob of -1.5; one token is one byte."""
    server = serve()
    found = model(server).loglikelihood([Instance("abc", " yes"), Instance("abc", " no")])
    assert [score for score, _ in found] == [-1.5 * len(" yes"), -1.5 * len(" no")]


def test_texts_are_generated_until_a_stop_string(serve: Serve) -> None:
    server = serve(lambda *_: " forty two. More")
    (text,) = model(server).generate_until([Instance("abc", {"until": ["."], "max_gen_toks": 64})])
    assert text.strip() == "forty two"

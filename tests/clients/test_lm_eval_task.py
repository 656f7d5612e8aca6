"""lm-eval over completions: log-likelihoods of answers, texts until a stop string, and a whole task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from quire.runtime.loading.resolve import resolve_model
from tests.clients.conftest import Served

pytest.importorskip("lm_eval")
completions = pytest.importorskip("lm_eval.models.openai_completions")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.model
QUESTION = "The capital of France is"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, served: Served) -> str:
    """A folder with the model's tokenizer as transformers writes it."""
    source, folder = resolve_model(None, offline=True).path, tmp_path_factory.mktemp("tokenizer")
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["ids", "texts"])
def model(request: pytest.FixtureRequest, served: Served, tokenizer: str) -> Any:
    """lm-eval's client of the server, which sends prompts as token ids or as texts."""
    return completions.LocalCompletionsAPI(
        model=served.model,
        base_url=f"{served.base_url}/completions",
        tokenizer_backend="huggingface",
        tokenizer=tokenizer,
        tokenized_requests=request.param == "ids",
        max_length=1024,
        max_gen_toks=32,
        batch_size=4,
        max_retries=1,
    )


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=idx) for idx, one in enumerate(arguments)]


def test_the_right_answer_is_the_likelier_one(model: Any) -> None:
    asked = instances("loglikelihood", (QUESTION, " Paris"), (QUESTION, " banana"), (QUESTION, " Rome"))
    (paris, is_greedy), *others = model.loglikelihood(asked, disable_tqdm=True)
    assert is_greedy
    assert all(likelihood < paris < 0 for likelihood, _ in others)
    assert not any(greedy for _, greedy in others)


def test_a_likelihood_is_the_sum_of_the_logprobs_of_the_same_tokens_when_they_are_generated(
    model: Any, served: Served
) -> None:
    with openai.OpenAI(base_url=served.base_url, api_key="none") as client:
        choice = client.completions.create(
            model=served.model, prompt=QUESTION, max_tokens=2, temperature=0, logprobs=1
        ).choices[0]
    ((likelihood, is_greedy),) = model.loglikelihood(instances("loglikelihood", (QUESTION, choice.text)))
    assert is_greedy
    assert likelihood == pytest.approx(sum(choice.logprobs.token_logprobs), abs=0.02)


def test_a_text_ends_before_its_stop_string(model: Any) -> None:
    asked = instances("generate_until", (QUESTION, {"until": ["."], "max_gen_toks": 24}))
    (text,) = model.generate_until(asked, disable_tqdm=True)
    assert "Paris" in text
    assert "." not in text


def test_a_task_is_scored(model: Any, tmp_path: Path) -> None:
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask

    rows = [
        {"country": "France", "choices": ["Paris", "banana", "seventeen"], "label": 0},
        {"country": "Italy", "choices": ["seventeen", "Rome", "banana"], "label": 1},
    ]
    task = ConfigurableTask(
        config={
            "task": "capitals",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "The capital of {{country}} is",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
        }
    )
    found = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0, log_samples=False)
    assert found["results"]["capitals"]["acc,none"] == 1.0

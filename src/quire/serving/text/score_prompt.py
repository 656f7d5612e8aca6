"""The prompt that asks a decoder whether a document answers a query. It is the one that Qwen3-Reranker was trained
with; the model answers yes or no."""

from __future__ import annotations

BEFORE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def pair_text(query: str, document: str) -> str:
    """Return the text between BEFORE and AFTER for one query and document."""
    return f"<Instruct>: {_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"

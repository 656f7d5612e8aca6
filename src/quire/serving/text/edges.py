"""Sets the tokens that a tokenizer puts before and after every text."""

from __future__ import annotations

from tokenizers import Tokenizer, processors


def set_edges(tokenizer: Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Make `tokenizer` put `bos_id` before and `eos_id` after every text that is encoded with special tokens. None adds
    no token."""
    edges = {index: tokenizer.id_to_token(index) for index in (bos_id, eos_id) if index is not None}
    before = [] if bos_id is None else [edges[bos_id]]
    after = [] if eos_id is None else [edges[eos_id]]
    named = [(token, index) for index, token in edges.items()]
    tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=named)

"""Token ids travel as int32: whatever else is sent is refused."""

from __future__ import annotations

import pytest

from quire.types.errors import InvalidRequest
from quire.types.request import Submit, pack_tokens
from quire.types.sampling import SamplingParams


@pytest.mark.parametrize("tokens", [(2**31,), (-(2**31) - 1,), (2**70,), (1.5,), ("a",), (None,)])
def test_a_token_id_that_is_no_int32_is_refused(tokens: tuple[object, ...]) -> None:
    with pytest.raises(InvalidRequest, match="prompt: holds a token id that is no int32; send token ids of the model"):
        Submit("a", tokens, SamplingParams())  # type: ignore[arg-type]


def test_any_sequence_of_token_ids_becomes_an_array() -> None:
    assert Submit("a", [1, 2**31 - 1], SamplingParams()).prompt_token_ids == pack_tokens((1, 2**31 - 1))  # type: ignore[arg-type]

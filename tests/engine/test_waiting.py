"""Requests that wait are admitted as soon as what they wait for is there."""

from __future__ import annotations

from array import array

import pytest

from harness import Harness
from quire.types.errors import InvalidRequest
from quire.types.request import Abort, Branch, Submit
from quire.types.sampling import SamplingParams, TokenRules


def steps_until_finished(engine: Harness, name: str) -> int:
    steps = 0
    while name not in engine.finished:
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("num_known", [15, 16, 17])
def test_nobody_waits_for_blocks_that_are_computed_and_cannot_be_published(num_known: int) -> None:
    """Two branches of one answer share its last full block, which therefore neither can publish. A third one must not
    wait for it: it would wait until a whole answer is over."""
    engine = Harness(num_blocks=200, block_size=4, depth=2)
    engine.submit("answer", [5, 6, 7, 8, 9], max_tokens=300)
    while 5 + len(engine.streams.get(engine.handles["answer"], [])) < num_known:
        engine.step()
    known = [5, 6, 7, 8, 9, *engine.streams[engine.handles["answer"]]]
    source = Branch("answer", 0, len(known))
    engine.submit("second", [*known, 11, 12, 13], max_tokens=200, source=source)
    for _ in range(3):
        engine.step()
    engine.submit("third", [*known, 21, 22, 23], max_tokens=4, source=source)
    assert steps_until_finished(engine, "third") < 10


def test_samples_that_have_ended_are_not_expected_to_grow() -> None:
    engine = Harness(num_blocks=400, block_size=4, depth=1)
    engine.submit("many", [5, 6, 7, 8, 9], max_tokens=190, n=8)
    group = engine.core.group("many")
    assert group is not None
    group.num_preemptions = 3  # from now on nobody may be admitted beside it that could preempt it
    for _ in range(4):
        engine.step()
    for index in range(1, 8):
        engine.core.abort(Abort("many", index))
    engine.submit("small", [31, 32, 33], max_tokens=60)
    assert steps_until_finished(engine, "small") < 70


def test_a_request_without_room_is_admitted_when_a_pinned_prompt_is_let_go() -> None:
    engine = Harness(num_blocks=60, block_size=4, depth=1, max_num_seqs=8)
    engine.submit("pinned", [20 + place % 70 for place in range(80)], max_tokens=1, pin="prompt")
    engine.run()
    engine.submit("long", [5, 6, 7], max_tokens=100)
    for _ in range(3):
        engine.step()
    engine.submit("waits", [41, 42, 43, 44], max_tokens=60)
    group = engine.core.group("waits")
    assert group is not None
    group.num_preemptions = 3
    for _ in range(3):
        engine.step()
    assert not group.is_running
    assert engine.core.unpin("", "prompt")
    engine.step()
    assert group.is_running


BAD: list[tuple[str, dict[str, object]]] = [
    ("cache_salt", {"cache_salt": None}),
    ("cache_salt", {"cache_salt": []}),
    ("tenant", {"tenant": [1]}),
    ("pin", {"pin": 5}),
    ("priority", {"priority": float("nan")}),
    ("stop_token_ids", {"rules": TokenRules((2**40,))}),
    ("stop_token_ids", {"rules": TokenRules((-1,))}),
]


@pytest.mark.parametrize(("field", "fields"), BAD)
@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_a_request_of_the_wrong_types_is_refused_and_leaves_nothing_behind(
    field: str, fields: dict[str, object], policy: str
) -> None:
    engine = Harness(policy=policy)
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        engine.core.submit(Submit("bad", array("i", [1, 2]), SamplingParams(), **fields))  # type: ignore[arg-type]
    engine.core.check()
    assert not engine.core.has_work


@pytest.mark.parametrize("name", [5, None, []])
def test_a_request_whose_id_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^request_id: "):
        Harness().core.submit(Submit(name, array("i", [1]), SamplingParams()))  # type: ignore[arg-type]


@pytest.mark.parametrize("typecode", ["q", "h", "I"])
def test_a_prompt_in_an_array_of_another_type_is_read_as_numbers(typecode: str) -> None:
    request = Submit("a", array(typecode, [1, 2, 3]), SamplingParams())
    assert request.prompt_token_ids == array("i", [1, 2, 3])
    assert request.prompt_token_ids.typecode == "i"

"""Values that an engine and its ranks exchange arrive unchanged."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.runtime.executor.channel import Channel, Kind, channel_pair
from quire.runtime.executor.codec import decode, encode
from quire.runtime.executor.plan_codec import PlanDecoder, PlanEncoder
from quire.runtime.executor.transfers import TransferMerger
from quire.runtime.loading.files import ModelFiles
from quire.types.adapters import AdapterPlacement
from quire.types.images import PromptImage
from quire.types.pooling import PoolingParams, PoolingWork
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import (
    BlockCopy,
    Candidates,
    Chunk,
    DraftRequest,
    LogprobTable,
    Masks,
    NewRow,
    PromptLogprobs,
    RowDraft,
    RowFailure,
    RowLogprobs,
    RowPooled,
    RowTokens,
    StateMove,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.types.transfer import (
    NO_TRANSFERS,
    FailedFile,
    FileMove,
    FoundFile,
    LookupResult,
    SlotMove,
    TransferReport,
    Transfers,
)
from tiny_models import engine_config, tiny_config

FULL_SAMPLING = SamplingParams(
    temperature=0.5,
    seed=2**63 + 5,
    stop=["a\ud800"],
    stop_token_ids=[3],
    logit_bias={4: -1.5},
    allowed_token_ids=[1, 2],
    structured_outputs={"regex": "a+"},
    logprobs=3,
)


def ints(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int32)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, arrays included, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    return bool(one == other)


def full_plan(step: int = 7) -> StepPlan:
    rules = TokenRules((2,), ((1, 2), (3,)), (2,), "grammar", "digest")
    new = NewRow(3, ints(1, 70_000, 5), 2, (9, 300), FULL_SAMPLING, rules, 1, 2**64 - 1, 4)
    image = PromptImage(0, 2, 2, b"\0\xff", b"key")
    other = new._replace(images=(image,), pools=PoolingWork(PoolingParams(), (3,)), adapter=2)
    return StepPlan(
        step,
        decode_rows=ints(1, 2),
        chunks=(Chunk(3, 0, 2, (3, 4), 1),),
        new_rows=(new, other),
        grant_rows=ints(1),
        grant_slots=ints(255),
        grant_blocks=ints(65_536),
        window_owners=ints(4),
        window_blocks=ints(-1, 6),
        adapters=(AdapterPlacement(1, "d"),),
        states=(StateMove(1, 2, 3, -1),),
        copies=(BlockCopy(1, 2),),
        released=(5, 6),
        writes=(RowTokens(1, 4, ints(8, 9)),),
        masks=Masks(ints(0), np.array([[2**32 - 1, 5]], dtype=np.uint32), np.array([True])),
        drafts=(DraftRequest(1, 3),),
        transfers=Transfers((SlotMove(1, 2),), (), (FileMove(b"k", 3),), (), (b"x",), drops_found=True),
        guided=True,
    )


def test_a_plan_with_all_fields_arrives_unchanged() -> None:
    plan = full_plan()
    assert not [item.name for item in fields(plan) if same(getattr(plan, item.name), getattr(StepPlan(0), item.name))]
    found = PlanDecoder().decode(PlanEncoder().encode(plan))
    assert same(found, plan)
    found.new_rows[0].token_ids[0] = 4  # workers write into what they get


def test_unchanged_decode_rows_are_not_sent_again() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    rows = np.arange(256, dtype=np.int32)
    plans = [StepPlan(0, decode_rows=rows), StepPlan(1, decode_rows=rows.copy()), full_plan(2), StepPlan(3)]
    plans += [StepPlan(4, decode_rows=ints(1, 2)), StepPlan(5, decode_rows=rows[::2].copy())]
    sizes = []
    for plan in plans:
        message = encoder.encode(plan)
        sizes.append(len(message))
        found = decoder.decode(message)
        assert same(found, plan)
        assert found.transfers is NO_TRANSFERS or plan.step == 2
        if len(found.decode_rows):
            found.decode_rows[:] = 0  # it is nobody else's
    assert sizes[1] < 16 < sizes[0]
    assert sizes[4] < 16


def test_a_step_in_which_every_row_gets_a_block_takes_two_kilobytes() -> None:
    rng, rows = np.random.default_rng(0), np.arange(256, dtype=np.int32)
    slots, blocks = rng.integers(0, 200, 256).astype(np.int32), rng.integers(0, 60_000, 256).astype(np.int32)
    encoder = PlanEncoder()
    encoder.encode(StepPlan(0, decode_rows=rows))
    plan = StepPlan(1, decode_rows=rows, grant_rows=rows, grant_slots=slots, grant_blocks=blocks)
    assert len(encoder.encode(plan)) <= 2_048


def test_results_reports_and_configurations_arrive_unchanged() -> None:
    floats = np.array([0.5, -np.inf], dtype=np.float32)
    table = LogprobTable(1, ints(1, 2), floats, ints(1))
    result = StepResult(
        3,
        ints(5, 200_000),
        (RowLogprobs(1, TokenLogprobs(ints(5, 6), floats, 2)),),
        (PromptLogprobs(1, table),),
        (RowFailure(2, "too long"),),
        Candidates(ints(0), ints(1, 2).reshape(1, 2), floats.reshape(1, 2)),
        (RowDraft(1, ints(3)),),
        (RowPooled(1, b"\0\0\x80?"),),
    )
    report = TransferReport((b"a",), (b"b",), (FailedFile(b"c", "io"),), (FoundFile(b"d", 1.5),), 1, 2, 0.5, 0.25)
    for value in (result, report, engine_config(), tiny_config(), ModelFiles("m", Path("/a b/c"), "hf"), None):
        assert same(decode(encode(value)), value)


def test_a_value_of_an_unsupported_type_is_refused() -> None:
    with pytest.raises(TypeError, match="a complex cannot be sent"):
        encode((1, 2j))
    with pytest.raises(TypeError, match="an array of complex128"):
        encode(np.zeros(1, dtype=complex))
    with pytest.raises(ValueError, match="truncated"):
        decode(encode("abc")[:-1])
    with pytest.raises(ValueError, match="1 bytes follow"):
        decode(encode("abc") + b"\0")


def test_messages_of_all_sizes_arrive_in_order() -> None:
    ours, socket = channel_pair()
    theirs, sizes = Channel(socket), (0, 5, 70_000, 1, 3_000_000, 65_535, 65_536, 2)
    sender = threading.Thread(target=lambda: [theirs.send(Kind.PLAN, bytes([size % 251]) * size) for size in sizes])
    sender.start()
    received = []
    for size in sizes:
        message = ours.receive()
        assert message is not None
        assert bytes(message.data) == bytes([size % 251]) * size
        received.append(len(message.data))
    sender.join()
    assert received == list(sizes)
    assert ours.receive(wait=False) is None
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_a_copy_is_complete_when_all_ranks_have_made_it() -> None:
    merger = TransferMerger(2)
    one = TransferReport((b"a", b"b"), (b"c",), (), (FoundFile(b"f", 5.0), FoundFile(b"g", 4.0)), 3, 1, 0.5, 0.1)
    merger.add(0, one)
    assert merger.take() == TransferReport()
    merger.add(1, TransferReport((b"a",), (), (FailedFile(b"b", "full"),), (FoundFile(b"g", 4.5, 2),), 2, 1, 0.25, 0.2))
    found = merger.take()
    assert found == TransferReport((b"a",), (), (FailedFile(b"b", "full"),), (FoundFile(b"g", 4.0, 2),), 2, 1, 0.5, 0.2)
    assert merger.orphans == [b"b"]
    merger.add(1, TransferReport((), (b"c",), (), (FoundFile(b"f", 6.0),), 1, 0, 0.125, 0.0))
    assert merger.take() == TransferReport((), (b"c",), (), (FoundFile(b"f", 4.0),), 1, 0, 0.125, 0.0)
    assert merger.take() == TransferReport()


def test_a_block_is_carried_when_all_ranks_have_carried_their_part() -> None:
    merger, lost = TransferMerger(2), FailedFile(b"c", "corrupt")
    merger.add(0, TransferReport(put=(b"a", b"b"), got=(b"c",), looked_up=(LookupResult(1, (b"x", b"y", b"z")),)))
    assert merger.take() == TransferReport()
    merger.add(1, TransferReport(put=(b"b",), lost=(lost,), looked_up=(LookupResult(1, (b"x", b"z")),)))
    assert merger.take() == TransferReport(put=(b"b",), lost=(lost,), looked_up=(LookupResult(1, (b"x", b"z")),))
    merger.add(1, TransferReport(put=(b"a",), looked_up=(LookupResult(2, (), "timeout"),)))
    merger.add(0, TransferReport(looked_up=(LookupResult(2, (b"x",)),)))
    assert merger.take() == TransferReport(put=(b"a",), looked_up=(LookupResult(2, (), "timeout"),))
    assert not merger.orphans  # no rank deletes blocks of a transport


def test_a_file_is_stored_again_after_one_rank_has_failed() -> None:
    merger = TransferMerger(2)
    for report in (TransferReport(failed=(FailedFile(b"a", "io"),)), TransferReport(stored=(b"a",))):
        merger.add(0, report)
        merger.add(1, TransferReport(stored=(b"a",)))
    assert merger.take() == replace(TransferReport(), stored=(b"a",), failed=(FailedFile(b"a", "io"),))

"""The record of a step plan: what the scheduler decided, and digests by which two plans are compared."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from quire.engine.recording.rows import RowTracker
from quire.types.adapters import NO_ADAPTER
from quire.types.step import StepPlan
from quire.types.transfer import NO_TRANSFERS

Record = dict[str, Any]


def plan_record(plan: StepPlan, rows: RowTracker) -> Record:
    """Return the record of a plan that the tracker has applied. Empty fields are left out."""
    record: Record = {"n": plan.step, "digest": plan_digest(plan), "decode": len(plan.decode_rows)}
    if blocks := block_digest(plan):
        record["blocks"] = blocks
    if plan.chunks:
        record["chunks"] = [
            [int(rows.ordinals[c.row]), int(rows.indices[c.row]), c.start, c.num_tokens, c.num_sampled]
            for c in plan.chunks
        ]
    if plan.new_rows:
        record["new"] = [int(rows.ordinals[new.row]) for new in plan.new_rows]
    if plan.adapters:
        record["adapters"] = [[slot, digest] for slot, digest in plan.adapters]
    counts = {"released": len(plan.released), "granted": len(plan.grant_rows), "copied": len(plan.copies)}
    record |= {name: count for name, count in counts.items() if count}
    if plan.transfers is not NO_TRANSFERS:
        moves = plan.transfers
        record["moved"] = [*map(len, (moves.saves, moves.loads, moves.stores, moves.fetches, moves.drops))]
    return record


def plan_digest(plan: StepPlan) -> str:
    """Return a digest of a plan's work: rows, chunks and numbers of blocks. Token values, seeds and keys are not
    covered."""
    digest = blake2b(digest_size=8)
    for array in (plan.decode_rows, plan.grant_rows, plan.grant_slots):
        digest.update(len(array).to_bytes(4, "little"))
        digest.update(array.tobytes())
    if plan.states:
        digest.update(repr([move[:2] for move in plan.states]).encode())
    if len(plan.window_owners):
        digest.update(len(plan.window_owners).to_bytes(4, "little"))
    if plan.chunks or plan.new_rows or plan.copies or plan.released or plan.writes or plan.drafts:
        rest = (
            [(c.row, c.start, c.num_tokens, c.sample_rows, c.num_sampled) for c in plan.chunks],
            [(n.row, len(n.token_ids), n.num_prompt_tokens, len(n.block_ids), n.sample_index) for n in plan.new_rows],
            len(plan.copies),
            plan.released,
            [(write.row, write.start, len(write.token_ids)) for write in plan.writes],
            [(each.row, each.num_tokens) for each in plan.drafts],
        )
        digest.update(repr(rest).encode())
    slots = [new.adapter for new in plan.new_rows]
    if plan.adapters or any(slot != NO_ADAPTER for slot in slots):
        digest.update(repr((slots, *map(tuple, plan.adapters))).encode())
    return digest.hexdigest()


def block_digest(plan: StepPlan) -> str:
    """Return a digest of the block ids and host slots in a plan; "" if it has none."""
    moves, arrived = plan.transfers, [new.block_ids for new in plan.new_rows]
    sides = (plan.window_owners.tolist(), plan.window_blocks.tolist(), [*map(tuple, plan.states)])
    if not len(plan.grant_blocks) and not arrived and not plan.copies and moves is NO_TRANSFERS and not any(sides):
        return ""
    copies = [(copy.source, copy.target) for copy in plan.copies]
    slots = ([*map(tuple, moves.saves)], [*map(tuple, moves.loads)])
    files = ([move.slot for move in moves.stores], [move.slot for move in moves.fetches], len(moves.drops))
    named = (plan.grant_blocks.tolist(), arrived, copies, slots, files, *(sides if any(sides) else ()))
    return blake2b(repr(named).encode(), digest_size=8).hexdigest()

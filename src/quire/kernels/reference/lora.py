"""LoRA in plain torch: low-rank updates of a linear layer's output, for several adapters in one batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Runs = Sequence[tuple[int, int]]  # ranges of outputs [begin, end)


def add_low_rank(
    out: Tensor,  # [rows, outputs], updated in place
    x: Tensor,  # [rows, inputs]
    a: Tensor,  # [slots, parts * max rank, inputs]
    b: Tensor,  # [slots, outputs, max rank]
    groups: Sequence[tuple[int, Tensor]],  # pairs of a slot and the rows [n] that use it
    ranks: Sequence[Sequence[int]],  # [slots, parts]; 0: the adapter does not change this part
    parts: Sequence[Runs],  # the output ranges of each part
) -> None:
    """Add (x A^T) B^T to `out`, with the A and B of each row's slot. Rows in no group are unchanged."""
    max_rank = b.shape[2]
    for slot, rows in groups:
        changed = [(part, rank) for part, rank in enumerate(ranks[slot]) if rank]
        if not changed:
            continue
        mine = x.index_select(0, rows)
        for part, rank in changed:
            first = part * max_rank
            low = mine @ a[slot, first : first + rank].t()  # [n, rank]
            for begin, end in parts[part]:
                out[:, begin:end].index_add_(0, rows, low @ b[slot, begin:end, :rank].t())

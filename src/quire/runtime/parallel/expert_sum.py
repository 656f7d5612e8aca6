"""The sum of expert outputs over ranks.

All ranks of a stage have all tokens, and each computes the outputs of its own experts, or of its parts of all experts.
Usually an all-reduce sums them. If ranks have whole experts, a rank's output is zero for tokens that use none of its
experts. With many tokens, these zeros are not sent: an all-to-all sends the other rows to the tokens' owners (each rank
owns a share of the tokens), the owners sum them, and an all-gather returns the sums to all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from quire.config.model import Experts
from quire.config.parallel import share_of
from quire.runtime.parallel.group import RankGroup
from quire.runtime.transfer import to_device

LEAST_ROWS = 1024  # tokens from which the saved bytes outweigh one more collective and a wait of the host
LEAST_SAVING = 1 / 8  # share of an all-reduce's bytes that must be saved


def saved_share(num: int, num_used: int, size: int) -> float:
    """Return the share of an all-reduce's bytes that the all-to-all saves with `size` ranks, if tokens choose
    `num_used` of `num` experts uniformly.

    An all-reduce sends every row to its owner from each other rank, and every sum back. The second half stays. Of the
    first half, the rows from ranks without an expert of the token are saved.
    """
    shares = [len(share_of(num, rank, size)) for rank in range(size)]
    without = [comb(num - held, num_used) / comb(num, num_used) for held in shares]
    return sum(without) / size / 2


@dataclass(frozen=True, slots=True)
class Senders:
    """Which ranks hold an expert of each token, while it is copied to the host."""

    held: Tensor  # [ranks, tokens] bool, on the host once `ready`
    ready: torch.cuda.Event | None  # None: no copy is needed

    def wait(self) -> Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        return self.held


class ExpertSum:
    """Sums expert outputs over the ranks of `group`, or does nothing if it is None. `owners` [experts]: the rank that
    holds each expert, if ranks have whole experts and an all-to-all can be faster. None: always use an all-reduce."""

    def __init__(self, group: RankGroup | None, owners: Tensor | None = None) -> None:
        self.group, self._owners = group, owners

    def senders(self, chosen: Tensor) -> Senders | None:
        """Find the ranks that hold an expert of each token. `chosen` [tokens, used] are the tokens' experts, -1 for
        padding. Returns None if `of` should use an all-reduce. Call this before the experts compute, so that the host
        need not wait for them."""
        if self.group is None or self._owners is None or len(chosen) < LEAST_ROWS:
            return None
        if chosen.is_cuda and (torch.cuda.is_current_stream_capturing() or _only_compiling()):
            return None  # a graph cannot have sizes that depend on data
        if self._owners.device != chosen.device:
            self._owners = self._owners.to(chosen.device)
        ranks = torch.arange(self.group.size, device=chosen.device)[:, None, None]
        owners = self._owners[chosen.clamp(min=0).long()].masked_fill(chosen < 0, -1)  # [tokens, used]
        held = (owners == ranks).any(dim=-1)  # [ranks, tokens]
        if not held.is_cuda:
            return Senders(held, None)
        copied = torch.empty(held.shape, dtype=torch.bool, pin_memory=True)
        copied.copy_(held, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return Senders(copied, ready)

    def of(self, x: Tensor, senders: Senders | None) -> Tensor:
        """Return the sum of x [tokens, hidden] over the ranks, bitwise equal on all of them. x may be overwritten."""
        if self.group is None or len(x) == 0:
            return x
        return self.group.all_reduce(x) if senders is None else _sum_rows(self.group, x, senders.wait())


def _only_compiling() -> bool:
    """Whether kernels are only compiled, not run, so that the experts of tokens are unknown."""
    from quire.kernels.triton.compiling import is_compiling_only

    return is_compiling_only()


NO_SUM = ExpertSum(None)


def expert_sum(group: RankGroup | None, experts: Experts, *, whole: bool) -> ExpertSum:
    """Make the sum for a layer's experts. `whole`: ranks have whole experts. An all-reduce is used if there is a shared
    expert, whose output is not zero on any rank, or if ranks share memory and send nothing."""
    if group is None or not whole or experts.shared_size or group.shared is not None:
        return ExpertSum(group)
    if saved_share(experts.num, experts.num_used, group.size) < LEAST_SAVING:
        return ExpertSum(group)
    counts = torch.tensor([len(share_of(experts.num, rank, group.size)) for rank in range(group.size)])
    return ExpertSum(group, torch.repeat_interleave(torch.arange(group.size), counts))


def _sum_rows(group: RankGroup, x: Tensor, held: Tensor) -> Tensor:
    """Return the sum of x [tokens, hidden], where rank r has zeros except in the rows of held[r]. Rows are added in the
    order of ranks, in float32, so that the result does not depend on the owner."""
    tokens, index = len(x), group.index
    shares = [share_of(tokens, rank, group.size) for rank in range(group.size)]
    mine = shares[index]
    flags = [held[index, share.start : share.stop] for share in shares]  # of the rows for each owner
    flags += [each[mine.start : mine.stop] for each in held]  # of the rows from each rank
    flags[index] = flags[group.size + index] = held[0, :0]  # rows of this rank for its own tokens are not sent
    places = [each.nonzero().flatten() for each in flags]
    on_device = torch.split(to_device(torch.cat(places), x.device), [len(each) for each in places])
    targets, sources = on_device[: group.size], on_device[group.size :]
    given = [x[share.start : share.stop].index_select(0, at) for share, at in zip(shares, targets, strict=True)]
    found = group.all_to_all(given, [(len(at), x.shape[1]) for at in sources])
    sums = x.new_zeros(-(-tokens // group.size), x.shape[1], dtype=torch.float32)  # the same size on all ranks
    for rank, (at, rows) in enumerate(zip(sources, found, strict=True)):
        if rank == index:
            sums[: len(mine)] += x[mine.start : mine.stop]
        else:
            sums.index_add_(0, at, rows.float())
    parts = zip(group.all_gather(sums.to(x.dtype)), shares, strict=True)
    return torch.cat([part[: len(share)] for part, share in parts])

"""One rank of several in a process of its own, over Gloo: `python gloo_sum_main.py RANK RANKS STORE`. Prints a digest
of the sum over ranks of what whole experts gave, by an all-to-all."""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from quire.config.model import Experts
from quire.runtime.parallel.expert_sum import LEAST_ROWS, expert_sum
from quire.runtime.parallel.group import TorchGroup

EXPERTS = Experts(8, 2, 32)
ROWS, HIDDEN = LEAST_ROWS + 5, 16


def given(size: int) -> tuple[Tensor, Tensor]:
    """The experts of each token [tokens, used], and what each rank has [ranks, tokens, hidden]."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randn(ROWS, EXPERTS.num, generator=generator).topk(EXPERTS.num_used).indices
    values = torch.randn(size, ROWS, HIDDEN, generator=generator)
    owners = torch.arange(EXPERTS.num) * size // EXPERTS.num
    for rank in range(size):
        values[rank][~(owners[chosen] == rank).any(dim=1)] = 0.0
    return chosen, values


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


def main() -> None:
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    total = expert_sum(TorchGroup(range(size), "gloo", 30.0), EXPERTS, whole=True)
    chosen, values = given(size)
    senders = total.senders(chosen)
    assert senders is not None
    found = total.of(values[rank], senders)
    dist.barrier()
    print(digest(found))


if __name__ == "__main__":
    main()

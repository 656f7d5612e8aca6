"""Communication between ranks that compute a step together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.kernels.native.shared_ranks import SharedRanks

_MOST_SENT = 64  # messages of a rank that may be in flight


class RankGroup(Protocol):
    """A group of ranks. All of them call the same operations in the same order. Every operation has a timeout; if it
    passes, the operation raises, and the engine is dead."""

    @property
    def index(self) -> int:
        """The number of this rank in the group, from 0."""

    @property
    def size(self) -> int: ...

    @property
    def shared(self) -> SharedRanks | None:
        """The shared memory with which a compiled program sums over the ranks. None: it cannot."""

    @property
    def in_graphs(self) -> bool:
        """Whether the operations can be captured in CUDA graphs."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, bitwise equal on all of them. x is overwritten and returned."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order. All have the same shape."""

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send parts[i] to rank i. Returns the tensors that all ranks sent to this one, with shape shapes[i] for rank
        i."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return the tensor of rank `source`. x is overwritten on all other ranks."""

    def send(self, x: Tensor, target: int) -> None:
        """Send x to a rank. May return before x has arrived; x must not be changed until then."""

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the next tensor from rank `source`, and return it."""

    def close(self) -> None:
        """Release the group. Idempotent."""


class OneRank:
    """A group of one rank, which sends nothing."""

    index, size, shared, in_graphs = 0, 1, None, True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:  # noqa: ARG002
        return list(parts)

    def broadcast(self, x: Tensor, source: int) -> Tensor:  # noqa: ARG002
        return x

    def send(self, x: Tensor, target: int) -> None:  # noqa: ARG002
        raise AssertionError(f"there is no rank {target}")

    def receive(self, x: Tensor, source: int) -> Tensor:  # noqa: ARG002
        raise AssertionError(f"there is no rank {source}")

    def close(self) -> None: ...


ONE_RANK = OneRank()


class TorchGroup:
    """Implements RankGroup by torch.distributed: NCCL between GPUs, Gloo between CPUs. With Gloo, GPU tensors (of ranks
    on one GPU) are copied to the host and back, since Gloo has few operations for GPUs."""

    shared = None

    def __init__(self, ranks: Sequence[int], backend: str, seconds: float) -> None:
        """Must be called by all ranks of the world, in the same order for all groups. `ranks`: the members, including
        this rank. `seconds`: the timeout of every operation."""
        import torch.distributed as dist

        self._dist, self._ranks = dist, tuple(ranks)
        self._group: Any = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend=backend)
        self.index, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self.in_graphs = backend == "nccl"
        self._sent: deque[tuple[Any, Tensor]] = deque()  # sends in flight, and their tensors

    def _given(self, x: Tensor) -> Tensor:
        """Return x contiguous, on the device on which the group's operations work."""
        return x.contiguous() if self.in_graphs else x.cpu().contiguous()

    def all_reduce(self, x: Tensor) -> Tensor:
        given = self._given(x)
        self._dist.all_reduce(given, group=self._group)
        return x if given is x else x.copy_(given)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        given = self._given(x)
        found = [torch.empty_like(given) for _ in range(self.size)]
        self._dist.all_gather(found, given, group=self._group)
        return [part.to(x.device) for part in found]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        sizes, counts = [math.prod(shape) for shape in shapes], [part.numel() for part in parts]
        given = self._given(torch.cat([part.reshape(-1) for part in parts]))
        out = given.new_empty(sum(sizes))
        self._dist.all_to_all_single(out, given, sizes, counts, group=self._group)
        found = torch.split(out.to(parts[0].device), sizes)
        return [piece.view(shape) for piece, shape in zip(found, shapes, strict=True)]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        given = self._given(x)
        self._dist.broadcast(given, self._ranks[source], group=self._group)
        return x if given is x else x.copy_(given)

    def send(self, x: Tensor, target: int) -> None:
        """Send without waiting for the receiver: two ranks may send to each other at the same time."""
        while self._sent and (len(self._sent) >= _MOST_SENT or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
        given = self._given(x)
        self._sent.append((self._dist.isend(given, self._ranks[target], group=self._group), given))

    def receive(self, x: Tensor, source: int) -> Tensor:
        given = self._given(x)
        self._dist.recv(given, self._ranks[source], group=self._group)
        return x if given is x else x.copy_(given)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._dist.destroy_process_group(group)

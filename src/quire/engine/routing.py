"""Routes: which edge receives the tokens of which request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from quire.types.output import Finished, TokensOut

Longs = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
Entry = TypeVar("Entry", bound=tuple[int, Any])  # a tuple that begins with a sample handle

_NO_EDGE = -1
_NO_HANDLE = -1


class Routes:
    """The edge of every live request. `split` divides a step's tokens among the edges.

    Adding and removing a request takes constant time per sample. Splitting a batch takes a few array operations if its
    samples differ from those of the last batch, and no work per sample if they do not.
    """

    def __init__(self) -> None:
        self._edges: dict[str, int] = {}  # by request id
        self._handles: dict[str, range] = {}  # by request id
        self._requests: defaultdict[int, dict[str, None]] = defaultdict(dict)  # by edge
        self._owners = _OwnerTable()
        self._samples: Longs | None = None  # the samples for which `_places` was computed
        self._places: dict[int, Places] = {}  # by edge

    def add(self, edge: int, request_id: str, handle: int, n: int) -> None:
        """Send the samples `handle` to `handle + n - 1` of a request to an edge from now on."""
        self._edges[request_id] = edge
        self._handles[request_id] = range(handle, handle + n)
        self._owners.add(self._handles[request_id], edge)
        self._requests[edge][request_id] = None

    def edge_of(self, request_id: str) -> int | None:
        return self._edges.get(request_id)

    def edges(self) -> list[int]:
        """Return the edges that have a live request."""
        return [edge for edge, requests in self._requests.items() if requests]

    def requests(self) -> list[str]:
        return list(self._edges)

    def drop(self, edge: int) -> list[str]:
        """Forget an edge and its requests. Returns the ids of the requests."""
        dropped = list(self._requests.pop(edge, ()))
        for request_id in dropped:
            self._forget(request_id)
        return dropped

    def split(self, out: TokensOut) -> Iterator[tuple[int, TokensOut]]:
        """Yield each edge's part of a batch. Leaves out samples of unknown requests, and forgets finished requests."""
        finished: defaultdict[int, list[Finished]] = defaultdict(list)
        for end in out.finished:
            edge = self._edges.get(end.request_id)
            if edge is not None:
                finished[edge].append(end)
        places, logprobs, best = self._find_places(out.samples), self._by_edge(out.logprobs), self._by_edge(out.best)
        for edge in {**places, **finished, **best}:
            samples, token_ids = _take(out, places.get(edge))
            yield (
                edge,
                TokensOut(
                    out.step,
                    samples,
                    token_ids,
                    tuple(logprobs.get(edge, ())),
                    tuple(finished.get(edge, ())),
                    tuple(best.get(edge, ())),
                ),
            )
        for end in out.finished:
            self._forget(end.request_id)

    def _find_places(self, samples: Longs) -> dict[int, Places]:
        """Return the indices of each edge's samples in the batch. The engine passes the same array while nothing
        changes."""
        if samples is not self._samples:
            owners = self._owners.of(samples)
            found = {edge: np.flatnonzero(owners == edge) for edge in self._requests}
            self._samples, self._places = samples, {edge: places for edge, places in found.items() if len(places)}
        return self._places

    def _by_edge(self, entries: Iterable[Entry]) -> dict[int, list[Entry]]:
        found: dict[int, list[Entry]] = {}
        for entry in entries:
            edge = self._owners.get(entry[0])
            if edge is not None:
                found.setdefault(edge, []).append(entry)
        return found

    def _forget(self, request_id: str) -> None:
        edge = self._edges.pop(request_id, None)
        if edge is None:
            return
        self._samples = None
        self._owners.remove(self._handles.pop(request_id))
        if edge in self._requests:
            self._requests[edge].pop(request_id, None)

    def check(self) -> None:
        assert set(self._edges) == set(self._handles)
        assert {h for handles in self._handles.values() for h in handles} == set(self._owners.handles())
        assert all(request_id in self._requests[edge] for request_id, edge in self._edges.items())
        assert sum(map(len, self._requests.values())) == len(self._edges)
        self._owners.check()


def _take(out: TokensOut, places: Places | None) -> tuple[Longs, npt.NDArray[np.int32]]:
    if places is None:
        return out.samples[:0], out.token_ids[:0]
    if len(places) == len(out.samples):
        return out.samples, out.token_ids
    return out.samples[places], out.token_ids[places]


class _OwnerTable:
    """The edge of every live sample handle: a dict, and in front of it hashed arrays that look up a whole batch.

    The low bits of a handle are its index in the arrays. Handles are numbered upwards, so two live ones rarely have the
    same index; then the arrays keep the first, and the dict has the other.
    """

    def __init__(self) -> None:
        self._edges: dict[int, int] = {}
        self._resize(1024)

    def _resize(self, size: int) -> None:
        """Make arrays of `size` entries, a power of two."""
        self._mask = size - 1
        self._handle_at: Longs = np.full(size, _NO_HANDLE, dtype=np.int64)
        self._edge_at: Longs = np.full(size, _NO_EDGE, dtype=np.int64)
        for handle, edge in self._edges.items():
            self._place(handle, edge)

    def _place(self, handle: int, edge: int) -> None:
        place = handle & self._mask
        if self._handle_at[place] == _NO_HANDLE:
            self._handle_at[place], self._edge_at[place] = handle, edge

    def add(self, handles: range, edge: int) -> None:
        for handle in handles:
            self._edges[handle] = edge
            self._place(handle, edge)
        if len(self._edges) > len(self._handle_at) // 2:
            self._resize(4 * len(self._handle_at))

    def remove(self, handles: range) -> None:
        for handle in handles:
            del self._edges[handle]
            place = handle & self._mask
            if self._handle_at[place] == handle:
                self._handle_at[place], self._edge_at[place] = _NO_HANDLE, _NO_EDGE

    def get(self, handle: int) -> int | None:
        return self._edges.get(handle)

    def of(self, handles: Longs) -> Longs:
        """Return the edge of each handle; a negative number for unknown handles."""
        places = handles & self._mask
        edges: Longs = self._edge_at[places]
        others = np.flatnonzero(self._handle_at[places] != handles)
        if len(others):
            edges[others] = [self._edges.get(handle, _NO_EDGE) for handle in handles[others].tolist()]
        return edges

    def handles(self) -> Iterable[int]:
        return self._edges

    def check(self) -> None:
        for place in np.flatnonzero(self._handle_at != _NO_HANDLE).tolist():
            handle = int(self._handle_at[place])
            assert handle & self._mask == place
            assert self._edges[handle] == self._edge_at[place]
        known = np.fromiter(self._edges, np.int64, len(self._edges))
        assert self.of(known).tolist() == list(self._edges.values())

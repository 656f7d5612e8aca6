"""Which edge hears of which request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from quire.types.output import Finished, TokensOut

Longs = npt.NDArray[np.int64]


class Routes:
    """The edge of every live request. A step's batch is split among the edges by places that are worked out anew only
    when the batch's members change."""

    def __init__(self) -> None:
        self._edges: dict[str, int] = {}  # by request id
        self._handles: dict[str, range] = {}  # by request id
        self._owners: dict[int, int] = {}  # edge by sample handle
        self._requests: defaultdict[int, dict[str, None]] = defaultdict(dict)  # by edge
        self._samples: Longs | None = None  # the batch that `_places` is of
        self._places: dict[int, npt.NDArray[np.intp]] = {}  # by edge

    def add(self, edge: int, request_id: str, handle: int, n: int) -> None:
        self._edges[request_id] = edge
        self._handles[request_id] = range(handle, handle + n)
        self._owners.update(dict.fromkeys(self._handles[request_id], edge))
        self._requests[edge][request_id] = None

    def edge_of(self, request_id: str) -> int | None:
        return self._edges.get(request_id)

    def edges(self) -> list[int]:
        """Who has a request here."""
        return [edge for edge, requests in self._requests.items() if requests]

    def requests(self) -> list[str]:
        return list(self._edges)

    def drop(self, edge: int) -> list[str]:
        """Forget an edge; returns the requests that have nobody to answer to now."""
        left = list(self._requests.pop(edge, ()))
        for request_id in left:
            self._forget(request_id)
        return left

    def split(self, out: TokensOut) -> Iterator[tuple[int, TokensOut]]:
        """Each edge's part of a batch; requests that ended are forgotten. What belongs to nobody is left out."""
        ended: defaultdict[int, list[Finished]] = defaultdict(list)
        for finished in out.finished:
            edge = self._edges.get(finished.request_id)
            if edge is not None:
                ended[edge].append(finished)
        places = self._find_places(out.samples)
        best = {self._owners[handle]: None for handle, _ in out.best if handle in self._owners}
        for edge in {**places, **ended, **best}:
            yield edge, self._part(out, edge, places.get(edge), tuple(ended.get(edge, ())))
        for finished in out.finished:
            self._forget(finished.request_id)

    def _part(
        self, out: TokensOut, edge: int, places: npt.NDArray[np.intp] | None, ended: tuple[Finished, ...]
    ) -> TokensOut:
        best = tuple(entry for entry in out.best if self._owners.get(entry[0]) == edge)
        if places is None:
            return TokensOut(out.step, out.samples[:0], out.token_ids[:0], (), ended, best)
        logprobs = tuple(entry for entry in out.logprobs if self._owners.get(entry[0]) == edge)
        if len(places) == len(out.samples):
            return TokensOut(out.step, out.samples, out.token_ids, logprobs, ended, best)
        return TokensOut(out.step, out.samples[places], out.token_ids[places], logprobs, ended, best)

    def _find_places(self, samples: Longs) -> dict[int, npt.NDArray[np.intp]]:
        """Where in the batch each edge's samples are. The engine hands out the same array while nothing changes."""
        if samples is not self._samples:
            found: defaultdict[int, list[int]] = defaultdict(list)
            for place, handle in enumerate(samples.tolist()):
                edge = self._owners.get(handle)
                if edge is not None:
                    found[edge].append(place)
            self._samples, self._places = samples, {e: np.array(p, dtype=np.intp) for e, p in found.items()}
        return self._places

    def _forget(self, request_id: str) -> None:
        edge = self._edges.pop(request_id, None)
        if edge is None:
            return
        self._samples = None
        for handle in self._handles.pop(request_id):
            del self._owners[handle]
        if edge in self._requests:
            self._requests[edge].pop(request_id, None)

    def check(self) -> None:
        assert set(self._edges) == set(self._handles)
        assert {h for handles in self._handles.values() for h in handles} == set(self._owners)
        assert all(request_id in self._requests[edge] for request_id, edge in self._edges.items())
        assert sum(map(len, self._requests.values())) == len(self._edges)

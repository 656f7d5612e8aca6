"""The process of one rank of an encoder: it loads its part of the model and encodes the texts that the engine sends."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.runtime.executor.channel import Kind, Message
from quire.runtime.executor.codec import decode, encode
from quire.runtime.executor.rank import RankServer

if TYPE_CHECKING:
    from quire.runtime.encoder.encoder import TextEncoder
    from quire.runtime.parallel.ranks import Ranks


class EncoderRank(RankServer):
    """Serves a RankedEncoder. All ranks compute the rows of a batch, and rank 0 sends them."""

    _encoder: TextEncoder

    def _build(self, job: dict[str, Any], config: Any, ranks: Ranks) -> tuple[int, int]:
        from quire.runtime.encoder.encoder import TextEncoder

        self._is_first = ranks.place.rank == 0
        self._encoder = TextEncoder(
            job["files"],
            job["model"],
            config,
            job["settings"],
            load_format=job["load_format"],
            progress=self._report_progress,
            ranks=ranks,
        )
        if config.device.device == "cpu":
            self._page.look_for_hangs()
        return self._encoder.num_bytes, 0

    def _execute_messages(self) -> None:
        while True:
            message = self._control.receive()
            assert message is not None
            if message.kind is Kind.STOP:
                self._encoder.close()
                return
            self._encode(message)

    def _encode(self, message: Message) -> None:
        assert message.kind is Kind.ENCODE
        number, tokens, lengths, firsts = decode(message.data)
        self._page.begin_step(number)
        rows = self._rows(tokens, lengths, firsts)
        self._page.waits_for_engine = True  # the engine may have no room for a large result yet
        self._control.send(Kind.RESULT, encode(rows if self._is_first else None))
        self._page.waits_for_engine = False
        self._page.end_step()

    def _rows(
        self, tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], firsts: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:  # [texts, size]
        """Return the row of each text. The texts are one batch already."""
        ends = [0, *np.cumsum(lengths).tolist()]
        texts = [tokens[start:end].tolist() for start, end in pairwise(ends)]
        ((_, rows),) = self._encoder.run(texts, first_parts=firsts.tolist())
        return rows.float().numpy()

"""The process of one rank of an encoder: `python -m quire.runtime.encoder.rank_main ...`, with the arguments of
`quire.runtime.executor.rank_main`."""

from __future__ import annotations

import sys

from quire.runtime.encoder.rank import EncoderRank
from quire.runtime.executor.rank_main import main

if __name__ == "__main__":
    main(sys.argv[1:], EncoderRank)

"""LLM over several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.types.errors import EngineDead
from real_server import children_of, command_of, is_alive
from tiny_served import write_tiny_model


def test_an_llm_whose_rank_is_killed_says_which_one_it_was(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    settings = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "num_kv_blocks": 256, "max_num_seqs": 4}
    model = write_tiny_model(tmp_path)
    with LLM(model, **settings) as single:
        expected = single.generate("some text", sampling)[0].outputs[0].token_ids
    with LLM(model, tensor_parallel_size=2, **settings) as llm:
        assert llm.config.parallel.executor == "processes"
        assert llm.generate("some text", sampling)[0].outputs[0].token_ids == expected
        ranks = sorted(pid for pid in children_of(os.getpid()) if "rank_main" in command_of(pid))
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises(
            EngineDead, match=rf"rank 0 of 2 \(stage 0, shard 0, pid {ranks[0]}\) was killed by signal 9"
        ):
            llm.generate("some text", sampling)
        with pytest.raises(EngineDead):
            llm.generate("some text", sampling)
    assert not [pid for pid in ranks if is_alive(pid)]

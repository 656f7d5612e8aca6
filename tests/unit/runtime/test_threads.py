from __future__ import annotations

import torch

from quire.runtime.threads import threads_for


def test_few_values_are_computed_on_one_thread_and_the_thread_count_is_restored() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with threads_for(10, most=10):
            assert torch.get_num_threads() == 1
        with threads_for(11, most=10):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

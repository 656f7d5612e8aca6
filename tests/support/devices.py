"""The device on which tests run models: a GPU where there is one, else the CPU. Triton's kernels are compiled in the
first case, and run in Triton's interpreter in the second: one process cannot do both."""

from __future__ import annotations

import os

import torch

from compile_only import COMPILE_ONLY

DEVICE_VARIABLE = "QUIRE_TEST_DEVICE"  # tests/conftest.py hides GPUs where it is "cpu"
DEVICE = os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() and not COMPILE_ONLY else "cpu")

"""Shared by all tests: nothing reaches for the hub, and tokenizers do not fight torch for cores."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

"""Stores tuned tilings on disk, and loads them when an engine starts."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.config.environment import read_environment

if TYPE_CHECKING:
    from quire.kernels.triton.gemm_skinny_plan import Found

logger = logging.getLogger("quire.runtime")


def adopt_tuned(device: torch.device) -> None:
    """Use the tilings of this GPU's table from now on, if there is a valid one."""
    import triton

    from quire.kernels.triton.gemm_skinny_plan import adopt

    found = read_table(torch.cuda.get_device_name(device), triton.__version__)
    if found is not None:
        adopt(found)


def table_path(gpu: str, version: str) -> Path:
    """Return the path of the table for a GPU model and Triton version, under the cache folder. It may not exist."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{gpu} triton {version}").strip("-").lower()
    return read_environment().cache / "tuning" / f"{name}.json"


def read_table(gpu: str, version: str) -> Found | None:
    """Return the tilings of a table, or None if there is no table. An invalid table is ignored with a warning."""
    from quire.kernels.triton.tuning import from_json

    path = table_path(gpu, version)
    if not path.is_file():
        return None
    try:
        found = from_json(path.read_text(encoding="utf-8"), gpu, version)
    except (OSError, ValueError) as error:
        logger.warning("the tuning table %s is ignored: %s; run `quire tune` again or remove it", path, error)
        return None
    logger.info("gemms use the tuned tilings in %s", path)
    return found


def add_to_table(found: Found, gpu: str, version: str) -> Path:
    """Add tilings to the table, which keeps those of other shapes. The file is replaced atomically. Returns its
    path."""
    from quire.kernels.triton.tuning import to_json

    path, known = table_path(gpu, version), read_table(gpu, version)
    if known is not None:
        found = type(found)(known.tilings | found.tilings, known.own_rows | found.own_rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(to_json(found, gpu, version), encoding="utf-8")
    part.replace(path)
    return path

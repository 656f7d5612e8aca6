"""`quire pull`: downloads a model into the cache."""

from __future__ import annotations

import argparse

from quire.config.sizes import format_size
from quire.serving.terminal import LoadingProgress


def run_pull(args: argparse.Namespace) -> int:
    from quire.runtime.loading.resolve import resolve_model

    progress = LoadingProgress()
    try:
        files = resolve_model(args.model, recheck=args.recheck, progress=progress)
    finally:
        progress.close()
    parts = [files.path] if files.path.is_file() else [part for part in files.path.rglob("*") if part.is_file()]
    print(f"{files.name}: {files.path} ({format_size(sum(part.stat().st_size for part in parts))})")
    return 0

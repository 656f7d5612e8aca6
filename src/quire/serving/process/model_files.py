"""Finds the files of a server's models, and checks the models, the memory asked for and the folders that the server
writes, before it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from quire.config.adapters import read_modules
from quire.config.asked_memory import check_asked_memory
from quire.config.environment import read_environment
from quire.config.server import ServerConfig
from quire.config.speculation import DRAFT_MODEL, read_speculation
from quire.runtime.host_memory import read_host_memory
from quire.runtime.loading.files import files_at
from quire.runtime.loading.model_config import read_family
from quire.runtime.loading.progress import Progress, silent
from quire.runtime.loading.resolve import resolve_model
from quire.runtime.models.registry import check_drafts
from quire.runtime.tiers.folder import PrivateFolder
from quire.runtime.torch_import import may_have_gpu
from quire.types.errors import ConfigError, ModelLoadError


def with_local_files(config: ServerConfig, *, offline: bool, progress: Progress = silent) -> ServerConfig:
    """Return the configuration with paths instead of model names. Downloads missing models, unless `offline`. Raises
    ConfigError for an unknown name, ModelLoadError for files that are not available."""
    source = config.source
    files = resolve_model(source.model, offline=offline, progress=progress)
    tokenizer = source.tokenizer
    if tokenizer:
        tokenizer = str(resolve_model(tokenizer, offline=offline, progress=progress, setting="tokenizer").path)
    engine, speculation = config.engine, read_speculation(config.engine.speculative_config)
    if speculation is not None and speculation.model is not None:
        drafts = resolve_model(speculation.model, offline=offline, progress=progress, setting=DRAFT_MODEL)
        draft = drafts.path.absolute()
        engine = replace(engine, speculative_config={**(engine.speculative_config or {}), "model": str(draft)})
    names = source.served_names or (files.name,)
    for module in read_modules(engine.lora_modules, enable=engine.enable_lora):
        if module.name in (*names, "default"):
            raise ConfigError("lora_modules", f"{module.name!r} is the name of the model itself", "choose another")
    found = replace(source, model=str(files.path.absolute()), tokenizer=tokenizer, served_names=names)
    return replace(config, source=found, engine=engine)


def find_local_files(config: ServerConfig, progress: Progress = silent) -> ServerConfig | None:
    """Return the configuration with the paths of models that are all on this machine, or None if some must be
    downloaded.

    Raises ConfigError or ModelLoadError for problems that a download cannot solve.
    """
    try:
        return with_local_files(config, offline=True, progress=progress)
    except ModelLoadError:
        speculation = read_speculation(config.engine.speculative_config)
        names = (config.source.model, config.source.tokenizer, None if speculation is None else speculation.model)
        if read_environment().offline or all(name is None or Path(name).expanduser().exists() for name in names):
            raise
        return None


def check_model(config: ServerConfig) -> None:
    """Check that the architectures of the local models are supported, and that a draft model can draft. Raises
    ConfigError or ModelLoadError. Dimensions are checked later, by the engine."""
    read_family(files_at(Path(config.source.model)))
    speculation = read_speculation(config.engine.speculative_config)
    if speculation is not None and speculation.model is not None:
        check_drafts(read_family(files_at(Path(speculation.model))))


def check_memory(config: ServerConfig) -> None:
    """Raise DoesNotFit if the caches that were asked for cannot fit into this machine's memory, whatever the model. A
    machine that may have a GPU is checked by the engine, but for its host memory."""
    check_asked_memory(config.engine, read_host_memory()[1], "cuda" if may_have_gpu() else "cpu")


def check_folders(config: ServerConfig) -> None:
    """Raise ConfigError if the folder of the disk tier or of the recording cannot be written."""
    path, record = config.engine.disk_cache_path, config.engine.record
    if path is not None:
        PrivateFolder(str(Path(path).expanduser())).close()
    if record is not None and not os.access(Path(record).absolute().parent, os.W_OK | os.X_OK):
        reason = f"the folder {str(Path(record).absolute().parent)!r} is not there or cannot be written"
        raise ConfigError("record", reason, "name a file in a folder that this user can write")

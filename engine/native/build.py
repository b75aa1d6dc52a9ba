"""Compiles C and C++ files into shared libraries, once for each machine and content.

A library's name holds the digest of all that it was made from, so a cache never gives a stale one, and a process that
has it needs no compiler. Its own digest lies beside it, so that a damaged one is made again. Processes that start at
once may all compile; each puts a complete file in place.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from engine.errors import NativeUnavailable

FOLDER = Path(__file__).parent
C_COMPILERS = ("cc", "gcc", "clang")
C_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-Wall")
THIS_CPU = "-march=native"
"""A flag after which a library is good for CPUs like this one alone; its name then says so."""
COMPILE_TIMEOUT_S = 60.0


def default_cache() -> Path:
    """For processes that are told no other folder: this user's, on this machine."""
    return Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}" / "native"


def load(
    source: str,
    cache: Path,
    *,
    compilers: Sequence[str] = C_COMPILERS,
    flags: Sequence[str] = C_FLAGS,
    includes: Sequence[str] = (),
    folder: Path | None = None,
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> ctypes.CDLL:
    """The library made from `source`, a file in `folder` (by default beside this one) as those that it includes are,
    kept in `cache`.

    Raises `NativeUnavailable`, with why.
    """
    folder = folder or FOLDER
    text = folder / source
    library = cache / _name(text, [folder / name for name in includes], flags)
    if not _is_whole(library):
        _compile(text, library, _find(compilers), flags, timeout_s)
    _check_owner(library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailable(f"{library} cannot be loaded: {error}") from error


def _name(source: Path, includes: Sequence[Path], flags: Sequence[str]) -> str:
    machine = (platform.system(), platform.machine(), *platform.libc_ver())
    made_from = sha256(b"\0".join(part.encode() for part in (*machine, *flags)))
    for text in (source, *includes):
        made_from.update(text.read_bytes())
    if THIS_CPU in flags:
        made_from.update(_cpu())
    return f"{source.stem}-{made_from.hexdigest()[:32]}.so"


def _cpu() -> bytes:
    """What tells this CPU from others of its architecture: its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()


def _find(compilers: Sequence[str]) -> str:
    for name in compilers:
        if (path := shutil.which(name)) is not None:
            return path
    raise NativeUnavailable(f"no compiler: none of {', '.join(compilers)} is on the path")


def _compile(source: Path, library: Path, compiler: str, flags: Sequence[str], timeout_s: float) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, unfinished = tempfile.mkstemp(prefix=library.stem, suffix=".tmp", dir=library.parent)
    except OSError as error:
        raise NativeUnavailable(f"{library.parent} cannot hold native libraries: {error.strerror}") from error
    os.close(handle)
    try:
        _run([compiler, *flags, "-o", unfinished, str(source)], timeout_s)
        _digest_file(library).write_text(_digest(Path(unfinished)))
        os.replace(unfinished, library)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _is_whole(library: Path) -> bool:
    """Whether it is what was compiled. Loading a damaged one would end the process, without a word."""
    try:
        return _digest_file(library).read_text() == _digest(library)
    except OSError:
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> str:
    return sha256(library.read_bytes()).hexdigest()


def _run(command: Sequence[str], timeout_s: float) -> None:
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own: a compiler runs others, and at the time-out all of them must go.
        compiling = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = compiling.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{command[0]} took longer than {timeout_s:g} s") from None
        finally:
            if compiling.poll() is None:
                os.killpg(compiling.pid, signal.SIGKILL)
                compiling.wait()
        if status:
            output.seek(0)
            raise NativeUnavailable(f"{command[0]} failed with status {status}: {output.read(2000).strip()}")


def _check_owner(library: Path) -> None:
    """Nobody else may have put it there: what is loaded runs."""
    if library.stat().st_uid not in (0, os.getuid()):
        raise NativeUnavailable(f"{library} belongs to another user")

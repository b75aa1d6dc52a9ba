"""Fetches a model's files from the Hugging Face hub into the hub library's own cache, with errors a user can act on.

Tokens for private models, proxies and the cache's place are the library's business, and set as its users know it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors, snapshot_download
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError  # type: ignore[attr-defined]
from tqdm import tqdm  # type: ignore[import-untyped]

from engine.errors import ModelError
from engine.model_store import Progress, is_gguf

_FETCH_ERRORS = (HTTPError, OSError, ValueError, getattr(errors, "XetDownloadError", OSError))
"""What the hub library raises when it cannot fetch. Older versions have no Xet, and no error for it."""


def fetch_from_hub(
    repo: str, variant: str | None, progress: Progress, *, endpoint: str | None = None, cache_dir: Path | None = None
) -> Path:
    """Folder with the newest safetensors model of `repo`, or with its one GGUF file (whose name holds `variant`).

    Downloads only what the cache lacks; without a connection, what is there whole is good enough. `endpoint` and
    `cache_dir` default to the hub library's. Raises `ModelError`.
    """

    def snapshot(*patterns: str) -> Path:
        # Subfolders hold other formats of the same weights, "consolidated" files the same tensors again.
        return Path(
            snapshot_download(
                repo,
                allow_patterns=list(patterns),
                ignore_patterns=["*/*", "consolidated*"],
                tqdm_class=_bar(progress),
                endpoint=endpoint,
                cache_dir=cache_dir,
            )
        )

    with _explained(repo):
        folder = snapshot("*.json", "*.jinja", *([] if variant else ["*.safetensors"]))
        if variant is None and any(folder.glob("*.safetensors")):
            return folder
        if len([path for path in folder.glob("*.gguf") if is_gguf(path.name, variant)]) == 1:
            return folder
        names = [name for name in HfApi(endpoint=endpoint).list_repo_files(repo) if is_gguf(name, None)]
        matching = [name for name in names if is_gguf(name, variant) and "/" not in name]
        if len(matching) == 1:
            return snapshot(matching[0])
    which = f" with {variant!r} in its name" if variant else ""
    raise ModelError(
        f"Hugging Face repository {repo!r} has no *.safetensors and not exactly one *.gguf{which}; "
        f"GGUF files there: {', '.join(sorted(names)) or 'none'}; choose one as {repo}:<part of its name>"
    )


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"Hugging Face repository {repo!r} wants its licence accepted: do so at https://huggingface.co/{repo}, "
            "then run: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"Hugging Face knows no model {repo!r}, or it is private: check the name at https://huggingface.co/models, "
            "or run: hf auth login"
        ) from error
    except _FETCH_ERRORS as error:
        raise ModelError(
            f"model {repo!r} is no local file or folder, and could not be fetched from Hugging Face: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}; check the "
            "connection and try again, or give the path of a model folder"
        ) from error


def _bar(progress: Progress) -> type[Any]:
    """A progress bar class for the hub library that shows nothing and reports to `progress`."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            if self.unit == "B" and self.total:  # the library also counts files
                progress("downloading", min(1.0, self.n / self.total))

    return Bar

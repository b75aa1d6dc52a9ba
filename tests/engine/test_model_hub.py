"""Models of the Hugging Face hub, from a hub of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from damaged_files import cut, safetensors
from fake_hub import fake_hub
from tiny_gguf import TinyGguf

from engine.errors import ModelError
from engine.model_hub import fetch_from_hub
from engine.model_store import pull_model, resolve_model


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return TinyGguf().write(tmp_path / "source" / "My Model.gguf").path


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache folder; at the end nothing half done is left in it."""
    folder = tmp_path / "cache"
    yield folder
    assert [path.name for path in folder.glob(".*")] == []


def quiet(stage: str, share: float) -> None:
    pass


HUB_MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',  # the hub keeps equal files once
    "model.safetensors": safetensors(bytes(5000)),
    "consolidated.safetensors": b"the same again",
    "original/params.json": b"{}",
    "README.md": b"# a model",
}


def test_a_hub_model_is_downloaded_without_what_is_not_needed(tmp_path: Path) -> None:
    shares: list[float] = []
    with fake_hub("org/name", HUB_MODEL) as (endpoint, downloads):
        folder = fetch_from_hub(
            "org/name", None, lambda stage, share: shares.append(share), endpoint=endpoint, cache_dir=tmp_path
        )

    assert sorted(downloads) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == HUB_MODEL["model.safetensors"]
    assert shares
    assert all(0.0 <= share <= 1.0 for share in shares)


def test_a_downloaded_hub_model_is_found_again_without_a_connection(tmp_path: Path) -> None:
    with fake_hub("org/name", HUB_MODEL) as (endpoint, _):
        online = fetch_from_hub("org/name", None, quiet, endpoint=endpoint, cache_dir=tmp_path)

    assert fetch_from_hub("org/name", None, quiet, endpoint=endpoint, cache_dir=tmp_path) == online


def test_a_cut_download_is_told_by_resolve_and_fetched_again_by_pull(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub("org/name", HUB_MODEL) as (endpoint, downloads):

        def fetch(repo: str, variant: str | None, progress: Any) -> Path:
            return fetch_from_hub(repo, variant, progress, endpoint=endpoint, cache_dir=tmp_path / "hub")

        monkeypatch.setattr("engine.model_hub.fetch_from_hub", fetch)
        folder = resolve_model("org/name", cache)
        cut(folder / "model.safetensors")
        with pytest.raises(ModelError, match=r"is damaged: .*; run: kvrelay pull org/name$"):
            resolve_model("org/name", cache)

        assert pull_model("org/name", cache, quiet) == folder

    assert (folder / "model.safetensors").read_bytes() == HUB_MODEL["model.safetensors"]
    assert downloads.count("model.safetensors") == 2


def test_a_hub_repository_with_one_gguf_file_gives_that(tmp_path: Path) -> None:
    with fake_hub("org/name", {"config.json": b"{}", "m-Q8_0.gguf": b"GGUF"}) as (endpoint, downloads):
        folder = fetch_from_hub("org/name", None, quiet, endpoint=endpoint, cache_dir=tmp_path)

    assert downloads == ["config.json", "m-Q8_0.gguf"]
    assert (folder / "m-Q8_0.gguf").read_bytes() == b"GGUF"


def test_of_several_gguf_files_on_the_hub_the_caller_names_one(tmp_path: Path) -> None:
    with fake_hub("org/name", {"m-Q4_0.gguf": b"four", "m-Q8_0.gguf": b"eight"}) as (endpoint, downloads):
        with pytest.raises(ModelError, match=r"GGUF files there: m-Q4_0\.gguf, m-Q8_0\.gguf; choose one as org/name:"):
            fetch_from_hub("org/name", None, quiet, endpoint=endpoint, cache_dir=tmp_path)
        folder = fetch_from_hub("org/name", "q8_0", quiet, endpoint=endpoint, cache_dir=tmp_path)

    assert downloads == ["m-Q8_0.gguf"]
    assert (folder / "m-Q8_0.gguf").read_bytes() == b"eight"


def test_a_hub_repository_without_weights_says_so(tmp_path: Path) -> None:
    with fake_hub("org/name", {"config.json": b"{}", "pytorch_model.bin": b"x"}) as (endpoint, _):
        with pytest.raises(ModelError, match="GGUF files there: none"):
            fetch_from_hub("org/name", None, quiet, endpoint=endpoint, cache_dir=tmp_path)


def test_a_repository_that_the_hub_does_not_know_says_where_to_look(tmp_path: Path) -> None:
    with fake_hub("org/name", {}) as (endpoint, _):
        with pytest.raises(ModelError, match=r"knows no model 'org/nme', or it is private: check .* hf auth login"):
            fetch_from_hub("org/nme", None, quiet, endpoint=endpoint, cache_dir=tmp_path)


def test_a_hub_that_cannot_be_reached_says_what_to_do(tmp_path: Path) -> None:
    with fake_hub("org/name", {}) as (endpoint, _):
        pass

    with pytest.raises(
        ModelError, match=r"'org/name' is no local file or folder, and could not be fetched.*connection"
    ):
        fetch_from_hub("org/name", None, quiet, endpoint=endpoint, cache_dir=tmp_path)


def test_a_hub_id_with_a_variant_is_imported_from_the_downloaded_file(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(repo: str, variant: str | None, progress: Any) -> Path:
        asked.append((repo, variant))
        TinyGguf(tied=False).write(gguf.parent / "other-Q8_0.gguf")
        return gguf.parent

    monkeypatch.setattr("engine.model_hub.fetch_from_hub", fetch)

    folder = resolve_model("org/name:q8_0", cache)

    assert asked == [("org/name", "q8_0")]
    assert folder.name.startswith("other-Q8_0-")
    assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]

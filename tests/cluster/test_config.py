from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster import config
from engine.cluster_key import ClusterKey
from engine.errors import ConfigError


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KVRELAY_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_folders_follow_the_xdg_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.default_model_dir() == tmp_path / ".cache/kvrelay/models"
    assert config.state_dir() == tmp_path / ".local/state/kvrelay"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/c")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # invalid by the specification
    assert config.default_model_dir() == Path("/var/c/kvrelay/models")
    assert config.state_dir() == tmp_path / ".local/state/kvrelay"


def test_one_variable_moves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_HOME", "/srv/kv")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/s")
    assert config.default_model_dir() == Path("/srv/kv/cache/models")
    assert config.state_dir() == Path("/srv/kv/state")


@pytest.mark.parametrize("home", ["/srv/kv", "/srv/" + "long/" * 30])
def test_ray_sockets_fit_into_the_path_that_the_kernel_takes(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_HOME", home)
    socket = config.ray_dir("a" * 32) / "session_2026-11-30_23-59-28_123456_1234567" / "sockets/plasma_store"
    assert len(str(socket)) <= config.MAX_SOCKET_PATH


def test_two_clusters_never_share_a_folder_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for home in ("/srv/kv", "/srv/" + "long/" * 30, "/srv/" + "long/" * 31):
        monkeypatch.setenv("KVRELAY_HOME", home)
        folders |= {config.ray_dir("a"), config.ray_dir("b")}
    assert len(folders) == 6


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=rf"cannot use {tmp_path}: Permission denied; set KVRELAY_HOME"):
        config.make_folder(tmp_path)
    with pytest.raises(ConfigError, match="; try another"):
        config.make_folder(tmp_path, remedy="try another")


def test_a_home_that_nobody_knows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_HOME", "~nobody-of-this-name/x")
    with pytest.raises(ConfigError, match="set KVRELAY_HOME"):
        config.state_dir()


def test_a_joined_ray_keeps_its_own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN": "theirs"})
    config.prepare_ray_environment(cluster_id="c", local=False, auth_token="ours")
    assert os.environ["RAY_AUTH_TOKEN"] == "theirs"
    config.prepare_ray_environment(cluster_id="c", local=True, auth_token="ours")
    assert (os.environ["RAY_AUTH_TOKEN"], os.environ["RAY_AUTH_MODE"]) == ("ours", "token")


KEY = ClusterKey(bytes(range(32)))


def test_a_cluster_key_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CLUSTER_KEY", KEY.secret.hex())

    assert config.take_cluster_key() == KEY

    assert "KVRELAY_CLUSTER_KEY" not in os.environ
    assert config.take_cluster_key() is None


def test_a_cluster_key_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY.secret.hex())
    monkeypatch.setenv("KVRELAY_CLUSTER_KEY_FILE", str(path))

    assert config.take_cluster_key() == KEY


@pytest.mark.parametrize(
    ("key", "file", "reason"),
    [
        ("12ab", None, "KVRELAY_CLUSTER_KEY: a cluster key has 32 bytes"),
        (None, "/nowhere/key", "KVRELAY_CLUSTER_KEY_FILE: cannot read the cluster key /nowhere/key"),
        ("12ab", "/nowhere/key", "both set"),
    ],
)
def test_a_cluster_key_that_cannot_be_used_is_told(
    monkeypatch: pytest.MonkeyPatch, key: str | None, file: str | None, reason: str
) -> None:
    for name, value in (("KVRELAY_CLUSTER_KEY", key), ("KVRELAY_CLUSTER_KEY_FILE", file)):
        if value is not None:
            monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=reason):
        config.take_cluster_key()


def test_a_failed_communicator_does_not_end_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    config.prepare_ray_environment(cluster_id="c", local=True, auth_token="ours")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"

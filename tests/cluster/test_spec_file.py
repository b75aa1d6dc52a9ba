from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cluster.spec import DEFAULT_PORT, ClusterSpec, PoolSpec
from cluster.spec_file import load_spec, parse_spec
from engine.errors import ConfigError
from engine.knobs import KNOBS

COMPLETE = """
name: prod-1
model: /models/llama
dtype: float32
pools:
  prefill: {replicas: 2, num_threads: 4, kv_memory_bytes: 2GiB, max_model_len: 4096}
  decode:
    replicas: 3
    kv_memory_bytes: 1048576
router:
  port: 0
  http_port: 8080
  api_keys: keys.yaml
  public_prefixes: prefixes.yaml
  tls_cert: /etc/cert.pem
  tls_key: /etc/key.pem
  default_timeout_s: 30
  log_calls: true
  otlp_endpoint: http://127.0.0.1:4317
  trace_ratio: 0.25
log_format: json
ray:
  address: 10.0.0.1:6379
supervision:
  backoff_max_s: 5.5
"""


def test_every_field_of_a_spec_is_read() -> None:
    spec = parse_spec(COMPLETE, "c.yaml")

    assert (spec.name, spec.model, spec.dtype) == ("prod-1", "/models/llama", "float32")
    assert (spec.pools.prefill.replicas, spec.pools.prefill.kv_memory_bytes) == (2, 2 * 1024**3)
    assert (spec.pools.prefill.max_model_len, spec.pools.decode.max_model_len) == (4096, None)
    assert spec.pools.decode.replicas == 3
    assert (spec.router.port, spec.router.default_timeout_s) == (0, 30.0)
    config = spec.router_config("/m")
    assert (config.http_port, config.tls_cert) == (8080, "/etc/cert.pem")
    assert config.api_keys == str(Path.cwd() / "keys.yaml")
    assert config.public_prefixes == str(Path.cwd() / "prefixes.yaml")
    told = (config.log_format, config.log_calls, config.otlp_endpoint, config.trace_ratio)
    assert told == ("json", True, "http://127.0.0.1:4317", 0.25)
    assert spec.worker_config("decode", "d", "/m", "").log_format == "json"
    assert not spec.ray.local
    assert spec.supervision.backoff_max_s == 5.5


def test_an_empty_file_is_the_default_spec() -> None:
    assert parse_spec("# nothing\n", "c.yaml") == ClusterSpec()
    assert ClusterSpec().router.port == DEFAULT_PORT


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("pools:\n  decode: {replica: 2}\n", "c.yaml:2: pools.decode.replica: unknown field, did you mean replicas?"),
        ("name: x\nmodels: y\n", "c.yaml:2: models: unknown field, did you mean model?"),
        ("pools:\n  decode:\n    replicas: two\n", "c.yaml:3: pools.decode.replicas: expected an integer, got 'two'"),
        ("router:\n  port: true\n", "c.yaml:2: router.port: expected an integer, got 'true'"),
        ("router:\n  port: 1.5\n", "c.yaml:2: router.port: expected an integer, got '1.5'"),
        ("name: 12\n", "c.yaml:1: name: expected text, got '12'"),
        ("model:\n", "c.yaml:1: model: expected text, got nothing"),
        ("pools:\n  - decode\n", "c.yaml:2: pools: expected a mapping, got a list"),
        ("pools:\n  decode: 3\n", "c.yaml:2: pools.decode: expected a mapping, got '3'"),
        ("- name\n", "c.yaml:1: expected a mapping, got a list"),
        ("name: a\nname: b\n", "c.yaml:2: name: given twice"),
        ("name: [\n", "c.yaml:2: not valid YAML: expected the node content, but found '<stream end>'"),
        ("router: {port: 70000}\n", "c.yaml:1: router: port must be in [0, 65535], got 70000"),
        ("pools:\n  decode:\n    block_size: 16\n    num_threads: 0\n",
         "c.yaml:4: pools.decode: num_threads must be at least 1, got 0"),
        ("pools:\n  decode:\n    kv_memory_bytes: 1G\n",
         "c.yaml:3: pools.decode.kv_memory_bytes: expected bytes, as in 512MiB, 120GB or 1048576 "
         "(units: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB), got '1G'"),
        ("pools:\n  decode:\n    replicas: 1\n    eviction_policy: fifo\n",
         "c.yaml:4: pools.decode: eviction_policy must be one of lru, got 'fifo'"),
        ("pools:\n  prefill:\n    sliding_window: 64\n",
         "c.yaml:3: pools.prefill: sliding_window 64 is not supported yet: a model runs with the window that "
         "its config.json gives it; leave this unset"),
        ("pools:\n  decode:\n    min_replicas: 2\n    max_replicas: 4\n    replicas: 1\n",
         "c.yaml:5: pools.decode: replicas must be in [2, 4], min_replicas to max_replicas, got 1"),
        ("pools:\n  decode:\n    min_replicas: 1\n",
         "c.yaml:3: pools.decode: min_replicas needs max_replicas beside it"),
        ("pools:\n  decode:\n    min_replicas: 3\n    max_replicas: 2\n",
         "c.yaml:4: pools.decode: max_replicas must be in [min_replicas, 256], got 2 and 3"),
        ("pools: {decode: {min_replicas: 0, max_replicas: 2}}\n",
         "c.yaml:1: pools: decode: min_replicas must be at least 1: every request ends on a decode worker"),
        ("pools:\n  decode:\n    ray_labels: zone=a,zone=b\n",
         "c.yaml:3: pools.decode: ray_labels must be NAME=VALUE, several with commas, each name once, "
         "got 'zone=a,zone=b'"),
        ("pools: {decode: {replicas: 0}}\n",
         "c.yaml:1: pools: decode: replicas must be at least 1: every request ends on a decode worker"),
        ("pools:\n  prefill: {block_size: 32}\n",
         "c.yaml:2: pools: decode: block_size 16 differs from prefill's 32: blocks move between the pools"),
        ("dtype: float16\npools:\n  decode: {kv_cache_dtype: int8}\n",
         "c.yaml:3: pools: kv_cache_dtype int8 of decode differs from prefill's float16: "
         "blocks move between the pools"),
        ("name: Big Cluster\n", "c.yaml:1: name must be 1 to 32 of a-z, 0-9 and inner dashes, got 'Big Cluster'"),
        ("dtype: int4\n", "c.yaml:1: dtype must be one of ['bfloat16', 'float16', 'float32'], got 'int4'"),
        ("ray: {address: here}\n", "c.yaml:1: ray: address must be local, auto or HOST:PORT, got 'here'"),
        ("supervision:\n  drain_s: .nan\n", "c.yaml:2: supervision.drain_s: a number must be finite, got '.nan'"),
        ("supervision:\n  drain_s: .inf\n", "c.yaml:2: supervision.drain_s: a number must be finite, got '.inf'"),
        ("ray: {helpers: !!bool maybe}\n", "c.yaml:1: ray.helpers: expected true or false, got 'maybe'"),
        ("name: !!timestamp x\n", "c.yaml:1: name: expected text, got 'x'"),
        ("router: {port: !!int ''}\n", "c.yaml:1: router.port: expected an integer, got nothing"),
        ("? [a]\n: 1\n", "c.yaml:1: a list: unknown field; known are "
         + ", ".join(field.name for field in dataclasses.fields(ClusterSpec))),
        ("pools:\n\tdecode: {}\n",
         "c.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("pools: &a {prefill: *a}\n", "c.yaml:1: pools.prefill.prefill: unknown field; known are "
         + ", ".join(field.name for field in dataclasses.fields(PoolSpec))),
        ("{a: " * 20000, "c.yaml: not valid YAML: maximum recursion depth exceeded"),
        ("name: 2001-99-99\n", "c.yaml:1: name: expected text, got '2001-99-99'"),
        ("name: !!python/object:os.system x\n", "c.yaml:1: name: expected text, got 'x'"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_file_line_and_path(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text, "c.yaml")
    assert str(caught.value) == complaint


def test_every_knob_is_a_field_of_a_pool_and_sizes_have_units() -> None:
    assert PoolSpec().knobs() == {name: knob.default for name, knob in KNOBS.items()}
    pools = parse_spec("pools: {decode: {kv_memory_bytes: 2GB, swap_space: 0GiB}}", "c.yaml").pools
    assert (pools.decode.kv_memory_bytes, pools.decode.swap_space) == (2 * 10**9, 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file or directory"):
        load_spec(tmp_path / "absent.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml: not valid YAML"):
        load_spec(path)


def test_the_command_line_overrides_the_file_and_is_checked_like_it() -> None:
    spec = parse_spec(COMPLETE, "c.yaml").with_overrides(prefill=0, decode=1, port=9000, name="other")
    assert (spec.pools.prefill.replicas, spec.pools.decode.replicas) == (0, 1)
    assert (spec.router.port, spec.name, spec.model) == (9000, "other", "/models/llama")
    with pytest.raises(ConfigError, match="replicas must be at least 1"):
        spec.with_overrides(decode=0)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ({"prefill": -1}, "--prefill: replicas must be in [0, 256], got -1"),
        ({"decode": 257}, "--decode: replicas must be in [0, 256], got 257"),
        ({"decode": 0}, "--decode: decode: replicas must be at least 1: every request ends on a decode worker"),
        ({"port": 70000}, "--port: port must be"),
        ({"name": "../x"}, "--name: name must be 1 to 32 of a-z, 0-9 and inner dashes, got '../x'"),
        ({"model": ""}, "--model: model must not be empty"),
    ],
)
def test_an_option_out_of_range_is_named(override: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterSpec().with_overrides(**override)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    "text", ["root:x:0:0 " * 1000, "x: y\n" + "k" * 5000 + ": 1", "name: " + "n" * 5000, "'" + "a" * 5000]
)
def test_a_file_that_is_no_spec_is_not_told_whole(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text, "c.yaml")
    assert len(str(caught.value)) < 300


def test_the_sample_spec_is_valid() -> None:
    sample = Path(__file__).parents[2] / "deploy" / "cluster.yaml"
    assert load_spec(sample).name == "default"


@pytest.mark.parametrize("field", ["gpu_memory_utilization", "priority_step_s", "kv_memory_bytes", "replicas"])
def test_a_number_beyond_all_arithmetic_is_refused_with_its_field(tmp_path: Path, field: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"pools:\n  decode:\n    {field}: {'9' * 400}\n")

    with pytest.raises(ConfigError, match=rf"spec.yaml:3: pools.decode.{field}: a number must be at most 2\^53"):
        load_spec(path)

"""`kvrelay plan`: what it prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cluster import cli
from cluster.cli_plan import plan
from engine.knobs import KNOBS

ROOT = Path(__file__).resolve().parents[2]
LLAMA_70B = ["--model", "llama-3-70b", "--dtype", "float16", "--memory", "120GB", "--context", "4000"]


def kvrelay_plan(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["plan", *arguments], prog_name="kvrelay")


def planned(*arguments: str) -> dict[str, Any]:
    result = kvrelay_plan(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


def test_the_text_shows_what_fits_and_what_would_change_it() -> None:
    result = kvrelay_plan(*LLAMA_70B)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "llama-3-70b: 80 layers, 8 KV heads of 128; KV in float16, 120 GB for it"
    assert "one token 327,680 B = 2 x 80 layers x 8 KV heads x 128 x 2 B" in lines
    assert "one block 5.24 MB, 16 tokens" in lines
    assert "the pool 22,888 blocks = 366,208 tokens in 120 GB" in lines
    assert "at once 91 such requests" in lines
    for beginning in (
        "kv_cache_dtype int8 164,160 B",
        "sliding_window 1024 327,680 B",
        "tensor_parallel_size 8 40,960 B",
    ):
        (line,) = (line for line in lines if line.startswith(beginning))
        assert line.endswith(("█", "▉", "▊", "▋", "▌", "▍", "▎", "▏"))
    assert any(line.startswith("256 83.9 MB 127.5 3.09 %") for line in lines)


def test_json_is_one_object_with_every_figure() -> None:
    printed = planned(*LLAMA_70B)
    assert printed["chosen"]["num_blocks"] == 22_888
    assert printed["question"]["shape"]["num_layers"] == 80
    assert printed["question"]["knobs"].keys() == KNOBS.keys()
    assert printed["kv_dtype"] == "float16"
    assert [each["block_size"] for each in printed["waste"]] == [8, 16, 32, 64, 128, 256]
    assert printed["alternatives"][0]["label"] == "kv_cache_dtype fp8_e4m3"


def test_every_knob_is_an_option() -> None:
    flags = {flag for option in plan.params for flag in option.opts}
    assert {knob.flag for knob in KNOBS.values()} <= flags
    assert "--memory" in flags


def test_without_options_it_plans_what_up_would_start() -> None:
    printed = planned()
    assert printed["question"]["shape"]["name"] == "smollm2-135m"
    assert printed["question"]["knobs"] == {name: knob.default for name, knob in KNOBS.items()}
    assert printed["chosen"]["num_blocks"] == 1456


def test_a_shape_or_a_folder_may_stand_for_a_name(tmp_path: Path) -> None:
    by_shape = planned("--layers", "80", "--kv-heads", "8", "--head-dim", "128", *LLAMA_70B[2:])
    config = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_folder = planned("--model", str(tmp_path), *LLAMA_70B[2:])
    assert by_shape["chosen"] == by_folder["chosen"] == planned(*LLAMA_70B)["chosen"]


def test_the_short_names_of_types_are_understood() -> None:
    printed = planned(*LLAMA_70B, "--dtype", "fp16", "--kv-cache-dtype", "fp8")
    assert (printed["question"]["dtype"], printed["kv_dtype"]) == ("float16", "fp8_e4m3")


def test_a_plan_that_workers_would_refuse_says_so() -> None:
    (first, *_) = planned(*LLAMA_70B, "--sliding-window", "4096")["notes"]
    assert first.startswith("workers do not start with this: sliding_window 4096 is not supported yet")
    assert (
        "a request of 8,000 tokens does not fit"
        in planned(*LLAMA_70B[:4], "--memory", "1GB", "--context", "8000")["notes"][0]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--model", "gpt-9"], 1, "model 'gpt-9' is neither a folder nor a shape known by name"),
        (["--memory", "120G"], 2, "Invalid value for '--memory' / '--kv-memory-bytes': expected bytes, as in 512MiB"),
        (["--memory", "0"], 1, "kv_memory_bytes must be at least 1, got 0"),
        (["--memory", "1kB"], 1, "memory: 1000 bytes a device are left for KV, less than one block of 368640 bytes"),
        (["--context", "9000"], 1, "context must be in [1, 8192], the max_model_len, got 9000"),
        (["--block-size", "10"], 1, "block_size must be a power of two in [1, 1024], got 10"),
        (["--dtype", "int4"], 1, "dtype must be one of bfloat16, float16, float32, got 'int4'"),
        (["--kv-cache-dtype", "int4"], 1, "kv_cache_dtype must be one of auto, float32, "),
        (["--tensor-parallel-size", "2"], 1, "tensor_parallel_size 2 does not divide the 3 KV heads of smollm2-135m"),
        (["--eviction-policy", "fifo"], 1, "eviction_policy must be one of lru, got 'fifo'"),
        (["--gpu-memory-utilization", "1.2"], 1, "gpu_memory_utilization must be in (0, 1], got 1.2"),
        (["--layers", "2"], 2, "needs --layers, --kv-heads and --head-dim"),
        (["--layers", "2", "--model", "llama-7b"], 2, "--model and --layers exclude each other"),
        (["--layers", "2", "--kv-heads", "0", "--head-dim", "8"], 1, "num_kv_heads must be in [1, 65536], got 0"),
    ],
)
def test_bad_input_names_the_field_and_its_limit(arguments: list[str], code: int, said: str) -> None:
    result = kvrelay_plan(*arguments)
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout == ""


def test_a_plan_needs_neither_torch_nor_ray() -> None:
    program = (
        "import sys\nfrom cluster.cli import main\nmain(['plan', '--json'], standalone_mode=False)\n"
        "print(*sorted({'torch', 'ray', 'numpy', 'grpc'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[1:] == [""], done.stderr


@pytest.mark.parametrize("option", ["--num-blocks-override", "--context", "--shared-prefix"])
def test_a_number_beyond_all_arithmetic_is_refused(option: str) -> None:
    result = kvrelay_plan("--layers", "2", "--kv-heads", "2", "--head-dim", "64", option, "9" * 400)

    assert result.exit_code in (1, 2)
    assert "at most 2^53" in result.stderr

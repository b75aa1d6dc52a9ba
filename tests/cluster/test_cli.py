"""The commands a user types, against a scripted router: what they print, where, and how they fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_router
import pytest
import trustme
from click.testing import CliRunner, Result
from fake_router import Event, FakeRouter, LiveCall, accepted, finished, running_fake_router, tokens

from cluster import cli, cli_pull, cli_status, state
from engine.errors import DeadlineExceeded, ModelError, NoWorkers, RequestError
from kvrelay import Client

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30.0


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with running_fake_router() as router:
        yield router


def kvrelay(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), input=stdin, prog_name="kvrelay")


def no_template(call: LiveCall) -> Iterator[Event]:
    if call.request.WhichOneof("input") == "chat":
        call.fail(RequestError("messages", "the model has no chat template; send a plain prompt"))
    return fake_router.answer(call)


def test_generate_writes_the_answer_to_stdout_and_the_account_to_stderr(router: FakeRouter) -> None:
    result = kvrelay("generate", "hello", "--router", router.address)
    assert result.exit_code == 0
    assert result.stdout == "Grüße ✓\n"
    assert "prefill on prefill-0, decode on decode-0" in result.stderr
    assert "TTFT      12.5 ms = queue 0.5 + prefill 12.0" in result.stderr


def test_generate_passes_on_what_was_given_and_nothing_else(router: FakeRouter) -> None:
    options = ["--max-tokens", "7", "--temperature", "0", "--seed", "3", "--stop", "a", "--stop", "b", "--ignore-eos"]
    kvrelay("generate", "hello", "--router", router.address, *options, "--request-id", "mine", "--model", "m")
    kvrelay("generate", "hello", "--router", router.address, "--priority", "-2")
    request, urgent = router.requests
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.seed) == (7, 0.0, 3)
    assert list(request.sampling.stop) == ["a", "b"]
    assert request.sampling.ignore_eos
    assert request.sampling.top_p == 1.0
    assert not request.sampling.HasField("logprobs")
    assert (request.request_id, request.model) == ("mine", "m")
    assert (request.HasField("priority"), urgent.priority) == (False, -2)


def test_changes_of_logits_are_options_too(router: FakeRouter) -> None:
    options = [
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.5",
        "--presence-penalty",
        "-0.5",
        "--frequency-penalty",
        "2",
    ]
    kvrelay("generate", "hello", "--router", router.address, *options)
    sampling = router.requests[-1].sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 2.0)


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"]])
def test_without_a_temperature_the_commands_take_the_most_likely_token(router: FakeRouter, command: list[str]) -> None:
    kvrelay(*command, "--router", router.address, stdin="hello\n")
    assert router.requests[-1].sampling.temperature == 0.0


def test_an_advice_names_the_flag_and_not_the_field(router: FakeRouter) -> None:
    router.error = DeadlineExceeded("too late (timeout_s sets how long a call may take)")
    result = kvrelay("generate", "x", "--router", router.address)
    assert result.stderr == "kvrelay: too late (--timeout sets how long a call may take)\n"


def test_generate_sends_a_chat_by_default_and_the_bare_prompt_with_raw(router: FakeRouter) -> None:
    kvrelay("generate", "hello", "--router", router.address, "--system", "be brief")
    kvrelay("generate", "hello", "--router", router.address, "--raw")
    chat, raw = router.requests
    assert [(m.role, m.content) for m in chat.chat.messages] == [("system", "be brief"), ("user", "hello")]
    assert raw.prompt == b"hello"


def test_generate_falls_back_to_the_bare_prompt_if_the_model_has_no_template(router: FakeRouter) -> None:
    router.script = no_template
    result = kvrelay("generate", "hello", "--router", router.address)
    assert (result.exit_code, result.stdout) == (0, "Grüße ✓\n")
    assert "note: sent as a plain prompt, because the model has no chat template" in result.stderr
    assert router.requests[1].prompt == b"hello"


@pytest.mark.parametrize("choice", [["--chat"], ["--system", "be brief"]])
def test_generate_does_not_fall_back_where_the_user_asked_for_a_chat(router: FakeRouter, choice: list[str]) -> None:
    router.script = no_template
    result = kvrelay("generate", "hello", "--router", router.address, *choice)
    assert result.exit_code == 1
    assert "no chat template" in result.stderr
    assert len(router.requests) == 1


def test_generate_json_prints_one_object_and_nothing_else(router: FakeRouter) -> None:
    result = kvrelay("generate", "hello", "--router", router.address, "--json")
    printed = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    assert printed["text"] == "Grüße ✓"
    assert printed["token_ids"] == [10, 11, 12]
    assert printed["route"]["blocks_adopted"] == 2
    assert printed["waterfall"]["parts"][0] == {"name": "queue", "duration_us": 500}


def test_generate_reads_the_prompt_from_stdin(router: FakeRouter) -> None:
    kvrelay("generate", "-", "--raw", "--router", router.address, stdin="Grüße\nvon stdin")
    assert router.requests[0].prompt == "Grüße\nvon stdin".encode()


def test_generate_names_bytes_that_are_no_utf8(router: FakeRouter) -> None:
    result = kvrelay("generate", "-", "--router", router.address, stdin=b"ab\xff")
    assert result.exit_code == 1
    assert result.stderr == "kvrelay: prompt: stdin is no UTF-8: invalid start byte at byte 2\n"
    assert router.requests == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["generate", ""], 1, "prompt: must not be empty"),
        (["generate", "x", "--temperature", "nan"], 1, "temperature: must be a finite number"),
        (["generate", "x", "--timeout", "0"], 1, "kvrelay: --timeout: must be in (0, "),
        (["chat", "--timeout", "0"], 1, "kvrelay: --timeout: must be in (0, "),
        (["generate", "x", "--max-tokens", "0"], 1, "kvrelay: --max-tokens: must be"),
        (["generate"], 2, "Missing argument 'PROMPT'"),
        (["generate", "x", "--max-tokens", "many"], 2, "'many' is not a valid integer"),
        (["generate", "x", "--raw", "--system", "y"], 2, "cannot be used with --raw"),
        (["status", "--json", "--watch"], 2, "exclude each other"),
        (["nonsense"], 2, "No such command 'nonsense'"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_1_or_2(
    router: FakeRouter, arguments: list[str], code: int, said: str
) -> None:
    more = ["--router", router.address] if arguments != ["nonsense"] else []
    result = kvrelay(*arguments, *more)
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout == ""
    assert router.requests == []


def test_up_names_a_file_of_keys_that_is_not_there_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(f"router: {{api_keys: {tmp_path}/none.yaml}}\n")
    result = kvrelay("up", str(tmp_path / "spec.yaml"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"API keys: {tmp_path}/none.yaml cannot be read" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("command", [["generate", "x"], ["status"], ["explain", "x"], ["chat"]])
def test_an_error_of_the_router_is_one_line_without_a_traceback(router: FakeRouter, command: list[str]) -> None:
    router.error = NoWorkers("no decode worker is ready:\ndecode-0 lost")
    result = kvrelay(*command, "--router", router.address)
    assert result.exit_code == 1
    assert result.stderr == "kvrelay: no decode worker is ready: decode-0 lost\n"


def test_an_error_after_the_first_token_keeps_what_was_written(router: FakeRouter) -> None:
    def script(call: LiveCall) -> Iterator[Event]:
        yield accepted()
        yield tokens(0, [1], "half an")
        call.fail(NoWorkers("all gone"))

    router.script = script
    result = kvrelay("generate", "x", "--router", router.address)
    assert (result.exit_code, result.stdout) == (1, "half an")
    assert result.stderr.splitlines()[-1] == "kvrelay: all gone"


def test_the_running_cluster_is_the_default_router(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def find_running(name: str | None) -> object:
        asked.append(name)
        return SimpleNamespace(router_address=router.address)

    monkeypatch.setattr(state, "find_running", find_running)
    assert kvrelay("generate", "hello").stdout == "Grüße ✓\n"
    assert kvrelay("generate", "hello", "--cluster", "other").stdout == "Grüße ✓\n"
    assert asked == [None, "other"]


def test_a_commands_key_comes_from_the_environment(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_API_KEY", "secret")
    assert kvrelay("generate", "hello", "--router", router.address).exit_code == 0
    assert kvrelay("status", "--router", router.address).exit_code == 0
    assert router.authorizations == ["Bearer secret"] * 2


def test_with_an_authority_a_command_talks_over_tls_only(router: FakeRouter, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(trustme.CA().cert_pem.bytes())
    result = kvrelay("status", "--router", router.address, "--tls-ca", str(ca))
    assert result.exit_code == 1
    assert router.requests == []


def test_status_shows_every_worker_its_blocks_and_its_trouble(router: FakeRouter) -> None:
    result = kvrelay("status", "--router", router.address)
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "router router-0, version 0.1.0, up 1 min 1 s: 1 live requests, 7 in all, 2 failed, 1 cancelled, 3 refused"
    )
    assert " ".join(lines[2].split()) == "prefill-0 prefill ready 1 2 100 60 30 10 850 tok/s 512.0 MiB"
    assert "decode-0: no answer for 5 s" in lines
    assert "decode-0 errors: DigestMismatch 3" in lines


def test_a_worker_that_does_nothing_has_no_speed(router: FakeRouter) -> None:
    with Client(router.address) as client:
        workers = client.status().workers
    assert [cli_status.speed_of(worker) for worker in workers] != ["-"] * len(workers)
    assert [cli_status.speed_of(replace(worker, running=0)) for worker in workers] == ["-"] * len(workers)


def test_status_json_has_the_fields_of_the_protocol(router: FakeRouter) -> None:
    printed = json.loads(kvrelay("status", "--json", "--router", router.address).stdout)
    assert printed["workers"][0]["blocks_free"] == 60
    assert printed["workers"][1]["errors"] == {"DigestMismatch": 3}


def test_explain_shows_price_route_and_outcome(router: FakeRouter) -> None:
    result = kvrelay("explain", "request-9", "--router", router.address)
    assert "request request-9: stop" in result.stdout
    assert "queue 1.5 + prefill 10.0" in result.stdout
    assert ["prefill", "10.0", "12.2"] in [line.split() for line in result.stdout.splitlines()]
    assert json.loads(kvrelay("explain", "r", "--json", "--router", router.address).stdout)["outcome"] == "stop"


def test_explain_without_an_id_lists_the_last_requests(router: FakeRouter) -> None:
    lines = kvrelay("explain", "--last", "2", "--router", router.address).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["request-0", "request-1"]
    assert "48" in lines[1]
    printed = json.loads(kvrelay("explain", "--json", "--router", router.address).stdout)
    assert len(printed) == 20
    assert printed[0]["considered"][0]["terms"][1]["actual_ms"] == 12.25


def test_chat_sends_the_whole_conversation_and_leaves_at_the_end_of_input(router: FakeRouter) -> None:
    result = kvrelay("chat", "--router", router.address, "--system", "be kind", stdin="hello\n\nagain\n")
    assert result.exit_code == 0
    assert result.stdout.count("Grüße ✓\n") == 2
    turns = [(m.role, m.content) for m in router.requests[-1].chat.messages]
    assert turns == [("system", "be kind"), ("user", "hello"), ("assistant", "Grüße ✓"), ("user", "again")]


def test_chat_starts_over_on_request(router: FakeRouter) -> None:
    result = kvrelay("chat", "--router", router.address, stdin="hello\n/new\nagain\n")
    assert "a new conversation\n" in result.stderr
    assert [m.content for m in router.requests[-1].chat.messages] == ["again"]


def test_chat_from_a_pipe_writes_the_answers_and_nothing_else(router: FakeRouter) -> None:
    assert kvrelay("chat", "--router", router.address, stdin="hello\nagain\n").stdout == "Grüße ✓\n" * 2


def test_an_error_ends_the_turn_but_not_the_chat(router: FakeRouter) -> None:
    def script(call: LiveCall) -> Iterator[Event]:
        if call.request.chat.messages[-1].content == "too much":
            call.fail(RequestError("messages", "over the limit"))
        return fake_router.answer(call)

    router.script = script
    result = kvrelay("chat", "--router", router.address, stdin="too much\nhello\n")
    assert result.exit_code == 0
    assert "kvrelay: messages: over the limit" in result.stderr
    assert [m.content for m in router.requests[-1].chat.messages] == ["hello"]


def test_pull_prints_the_folder_and_passes_on_what_goes_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def pull_model(name: str, cache_dir: Path, progress: Callable[[str, float], None]) -> Path:
        if name != "good":
            raise ModelError(f"model {name!r} not found")
        for share in (0.0, 0.5, 1.0):
            progress("convert", share)
        return cache_dir / name

    monkeypatch.setattr(cli_pull, "pull_model", pull_model)
    assert kvrelay("pull", "good", "--model-dir", str(tmp_path)).stdout == f"{tmp_path}/good\n"
    printed = kvrelay("pull", "good", "--model-dir", str(tmp_path), "--json").stdout
    assert json.loads(printed) == {"name": "good", "path": f"{tmp_path}/good"}
    bad = kvrelay("pull", "bad", "--model-dir", str(tmp_path))
    assert (bad.exit_code, bad.stderr) == (1, "kvrelay: model 'bad' not found\n")


def test_help_names_every_command_and_imports_none() -> None:
    program = (
        "import sys\nfrom cluster.cli import main\nmain(['--help'], standalone_mode=False)\n"
        "print('loaded:', *sorted(name for name in sys.modules if name.partition('.')[0] in "
        "('grpc', 'torch', 'ray', 'rich', 'kvrelay') or name.startswith('cluster.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    *help_text, loaded = done.stdout.splitlines()
    assert loaded == "loaded: cluster.cli"
    assert [line.split()[0] for line in help_text[-len(cli.COMMANDS) :]] == list(cli.COMMANDS)


def test_generate_loads_neither_torch_nor_ray(router: FakeRouter) -> None:
    done = run_and_list_heavy_modules("generate", "x", "--router", router.address)
    assert done.stdout.splitlines() == ["Grüße ✓", ""], done.stderr


def test_looking_for_a_running_cluster_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    done = run_and_list_heavy_modules("status", home=tmp_path)
    assert done.stdout.splitlines() == [""], done.stderr
    assert done.stderr.startswith("kvrelay: no cluster runs here; start one with `kvrelay up`")


def run_and_list_heavy_modules(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh interpreter; the last line of stdout names the heavy modules that it loaded."""
    program = (
        "import sys\nfrom cluster.cli import main\n"
        f"main({list(arguments)!r}, standalone_mode=False)\n"
        "print(*sorted({'torch', 'ray', 'numpy'} & sys.modules.keys()))"
    )
    environment = {**os.environ, **({"KVRELAY_HOME": str(home)} if home else {})}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S
    )


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A shell has its background jobs ignore SIGINT, and what they start inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.processes
@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"]])
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_cancels_the_answer_at_the_router(router: FakeRouter, command: list[str]) -> None:
    def script(call: LiveCall) -> Iterator[Event]:
        yield accepted()
        if call.request.chat.messages[-1].content == "again":
            yield finished(0, text="second answer")
            return
        yield tokens(0, [1], "first word")
        call.wait_until_over()

    router.script = script
    arguments = [sys.executable, "-m", "cluster", *command, "--router", router.address]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        said = ""
        while "first word" not in said:
            character = process.stdout.read(1)
            assert character, f"ended before the first word: {said}"
            said += character
        process.send_signal(signal.SIGINT)
        assert router.over.get(timeout=WAIT_S).over.is_set()
        stdout, stderr = process.communicate("again\n" if command == ["chat"] else None, timeout=WAIT_S)
    assert "Traceback" not in stderr
    if command == ["chat"]:
        assert process.returncode == 0
        assert "[cancelled]" in stdout
        assert "second answer" in stdout
    else:
        assert process.returncode == cli.EXIT_INTERRUPTED

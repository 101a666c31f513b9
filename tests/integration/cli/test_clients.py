"""The client commands as processes, against a gateway in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pty
import re
import shlex
import signal
import sys

import grpc
import pytest

from baton.cli.client import printable
from baton.cli.request_flags import RequestFlags
from baton.v1 import gateway_pb2_grpc
from baton.v1.common_pb2 import SamplingParams, StopConditions, Structure
from tests.integration.cli.fake_gateway import LONG_ADDRESS, RoteGateway

STOP_FLAGS = {"strings": "stop", "token_ids": "stop_token_id"}


@pytest.fixture
async def gateway():
    """The gateway and its address."""
    server = grpc.aio.server()
    rote = RoteGateway()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(rote, server)
    rote.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield rote
    await server.stop(0)


async def start(
    *args: str,
    stdin: int = asyncio.subprocess.PIPE,
    stdout: int = asyncio.subprocess.PIPE,
    **environment: str,
):
    command = [sys.executable, "-m", "baton.cli", *args]
    environment = {**os.environ, **environment}
    return await asyncio.create_subprocess_exec(
        *command, stdin=stdin, stdout=stdout, stderr=asyncio.subprocess.PIPE, env=environment
    )


async def baton(*args: str, given: bytes = b"") -> tuple[int, str, str]:
    process = await start(*args)
    out, err = await process.communicate(given)
    return process.returncode, out.decode(), err.decode()


async def test_generate_writes_the_text_and_nothing_else(gateway):
    result = await baton("generate", "why is the sky blue", "--address", gateway.address)
    assert result == (0, "why is the sky blue\n", "")
    (request,) = gateway.requests
    assert [(turn.role, turn.content) for turn in request.messages] == [("user", "why is the sky blue")]
    assert not request.sampling.ListFields()
    assert not request.stop.ListFields()


async def test_generate_reads_a_pipe_and_passes_every_flag(gateway):
    flags = "--raw --model m --max-tokens 9 --temperature 0 --top-k 3 --top-p 0.5 --min-p 0 --seed 18446744073709551615"
    flags += " --stop a --stop b"
    code, out, _ = await baton("generate", "-", *flags.split(), "--address", gateway.address, given="grün\n".encode())
    assert (code, out) == (0, "grün\n")
    (request,) = gateway.requests
    assert request.text == "grün"
    assert request.model == "m"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 3, 0.5, 0.0)
    assert sampling.HasField("temperature")
    assert sampling.HasField("min_p")
    assert sampling.seed == 2**64 - 1
    assert (request.stop.max_tokens, list(request.stop.strings)) == (9, ["a", "b"])


async def test_generate_passes_every_other_flag_and_shows_log_probabilities(gateway, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "string"}')
    flags = "--repetition-penalty 1.5 --frequency-penalty -0.5 --presence-penalty 0.25 --logit-bias 7=-100"
    flags += " --logit-bias 8=1.5 --min-tokens 0 --stop-token-id 3 --stop-token-id 4 --ignore-eos"
    flags += f" --logprobs 1 --prompt-logprobs 0 --json-schema @{tmp_path}/schema.json"
    code, out, err = await baton("generate", "hello", *flags.split(), "--address", gateway.address)
    assert (code, out) == (0, "hello\n")
    assert err.splitlines() == ["prompt token 5: -0.5000", "answer token 0: -1.2500 (likeliest: 9 -0.7500)"]
    (request,) = gateway.requests
    sampling, stop = request.sampling, request.stop
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -0.5, 0.25)
    assert dict(sampling.logit_bias) == {7: -100.0, 8: 1.5}
    assert (stop.min_tokens, stop.HasField("min_tokens"), list(stop.token_ids)) == (0, True, [3, 4])
    assert stop.ignore_eos
    assert (request.logprobs.output_top, request.logprobs.prompt_top) == (1, 0)
    assert request.structure.json_schema == '{"type": "string"}'
    assert not request.structure.HasField("regex")


async def test_generate_puts_each_of_several_answers_under_its_number(gateway):
    code, out, err = await baton("generate", "hello", *["--n", "3", "--logprobs", "0"], "--address", gateway.address)
    assert (code, out) == (0, "--- 1 ---\nhello\n--- 2 ---\nHELLO\n--- 3 ---\nHELLOHELLO\n")
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "answer token 0",
        "answer 2 token 0",
        "answer 3 token 0",
    ]
    assert gateway.requests[0].n == 3


def test_the_commands_have_a_flag_for_each_parameter_of_the_protos():
    """What a flag is not for: ids of the request, and input that is no text."""
    flags = {field.name for field in dataclasses.fields(RequestFlags)}
    for message, renamed in ((SamplingParams, {}), (Structure, {}), (StopConditions, STOP_FLAGS)):
        fields = {field.name for field in message.DESCRIPTOR.fields}
        assert {renamed.get(name, name) for name in fields} <= flags


async def test_a_file_that_is_not_there_is_named():
    assert await baton("generate", "x", "--regex", "@/nowhere/x") == (
        1,
        "",
        "baton: /nowhere/x: No such file or directory\n",
    )


@pytest.mark.parametrize(
    ("command", "redirection", "reason"),
    [
        (["generate", "hello"], ">/dev/full", "cannot write to standard output: No space left on device"),
        (["chat"], ">/dev/full", "cannot write to standard output: No space left on device"),
        (["status"], ">/dev/full", "cannot write to standard output: No space left on device"),
        (["generate", "hello"], ">&-", "standard output is closed"),
    ],
)
async def test_an_output_that_takes_nothing_is_one_line(gateway, command, redirection, reason):
    words = shlex.join([sys.executable, "-m", "baton.cli", *command, "--address", gateway.address])
    shell = await asyncio.create_subprocess_shell(
        f"{words} {redirection}", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, err = await shell.communicate(b"hello\n")
    assert (shell.returncode, err.decode()) == (1, f"baton: {reason}\n")


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
async def test_a_closed_input_is_one_line(gateway, command):
    words = shlex.join([sys.executable, "-m", "baton.cli", *command, "--address", gateway.address])
    shell = await asyncio.create_subprocess_shell(
        f"{words} <&-", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await shell.communicate()
    assert (shell.returncode, out) == (1, b"")
    assert re.fullmatch(rb"baton: (prompt|chat): standard input is closed\n", err)


@pytest.mark.parametrize("coding", ["utf-8", "utf-8:surrogateescape"])
async def test_chat_says_what_is_wrong_with_input_that_is_not_utf8(gateway, coding):
    process = await start("chat", "--address", gateway.address, PYTHONIOENCODING=coding)
    _, err = await process.communicate(b"gr\xfcn\n")
    assert (process.returncode, err) == (1, b"baton: chat: standard input must be UTF-8 text\n")


async def test_an_output_of_a_small_encoding_is_named(gateway):
    process = await start("generate", "grün", "--address", gateway.address, PYTHONIOENCODING="ascii")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert err.startswith(b"baton: standard output takes ascii only, and the text has more: set PYTHONIOENCODING=utf-8")
    assert err.count(b"\n") == 1


async def test_control_characters_pass_through_a_pipe_unchanged(gateway):
    _, out, _ = await baton("generate", "a\x1b[2Jb\n", "--address", gateway.address)
    assert out == "a\x1b[2Jb\n"


def test_control_characters_do_not_reach_a_terminal():
    assert printable("a\x1b[2Jb\r\x9bc\tgrün 日本 🙂\n\u202e") == "a[2Jbc\tgrün 日本 🙂\n"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("full", "class chat is full; a retry can succeed in 1.5 s"),
        ("long", "messages: 9000 tokens, more than 8192"),
    ],
)
async def test_refusals_are_one_line_and_a_failure(gateway, prompt, message):
    assert await baton("generate", prompt, "--address", gateway.address) == (1, "", f"baton: {message}\n")
    assert await baton("generate", prompt, "--n", "2", "--address", gateway.address) == (1, "", f"baton: {message}\n")


@pytest.mark.parametrize("command", [["generate", "hello"], ["status"]])
async def test_no_gateway_is_one_line_and_a_failure(command):
    result = await baton(*command, "--address", "127.0.0.1:1")
    assert result == (1, "", "baton: no gateway answers at 127.0.0.1:1; `baton up` starts one\n")


async def test_input_that_is_not_utf8(gateway):
    code, out, err = await baton("generate", "-", "--address", gateway.address, given=b"\xff")
    assert (code, out, err) == (1, "", "baton: prompt: must be UTF-8 text; byte 0 of standard input is none\n")
    code, out, err = await baton("generate", os.fsdecode(b"\xff"), "--address", gateway.address)
    assert (code, out, err) == (1, "", "baton: arguments must be UTF-8 text\n")
    assert not gateway.requests


async def test_interrupt_cancels_the_generation(gateway):
    process = await start("generate", "forever young", "--address", gateway.address)
    assert await process.stdout.readexactly(len("forever young")) == b"forever young"
    process.send_signal(signal.SIGINT)
    assert await process.communicate() == (b"", b"")
    assert process.returncode == 130
    await asyncio.wait_for(gateway.cancelled.wait(), 10)


async def test_reader_that_goes_away_ends_the_generation_quietly(gateway):
    read_end, write_end = os.pipe()
    process = await start("generate", "forever and ever", "--address", gateway.address, stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    _, err = await process.communicate()
    assert err == b""
    assert process.returncode == 141


async def test_status_shows_queues_workers_and_unknown_values(gateway):
    code, out, err = await baton("status", "--address", gateway.address)
    assert (code, err) == (0, "")
    assert "tiny (bfloat16), 8192 tokens of context" in out
    assert "5 requests" in out
    assert "3 of 256" in out
    assert "prefill-1" in out
    assert "unknown" in out
    assert "0 of 1000" in out
    (worker,) = [line for line in out.splitlines() if LONG_ADDRESS in line]  # whole, in one line
    assert worker.startswith("prefill-1 ")
    assert " cuda:1 (flashinfer) " in worker
    assert worker.rstrip().endswith("ago")


async def test_chat_keeps_the_conversation_until_reset(gateway):
    lines = "one\nlong\ntwo\n/help\n/nonsense\n/reset\nthree\n"
    code, out, err = await baton("chat", "--system", "Be brief.", "--address", gateway.address, given=lines.encode())
    assert (code, err) == (1, "baton: messages: 9000 tokens, more than 8192\n")
    told = [[turn.content for turn in request.messages] for request in gateway.requests]
    assert told == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "one", "long"],
        ["Be brief.", "one", "one", "two"],  # a turn that failed leaves no trace
        ["Be brief.", "three"],
    ]
    assert "forget the conversation" in out
    assert "no such command: /nonsense" in out
    assert "7 prompt tokens, 1 answer tokens" in out


async def test_chat_at_a_terminal_stops_an_answer_on_ctrl_c_and_goes_on(gateway):
    terminal, other_end = pty.openpty()
    process = await start("chat", "--address", gateway.address, stdin=other_end, stdout=other_end)
    os.close(other_end)
    loop = asyncio.get_running_loop()
    shown = bytearray()

    async def wait_for(text: bytes) -> None:
        async with asyncio.timeout(20):
            while text not in shown:
                readable = asyncio.Event()
                loop.add_reader(terminal, readable.set)
                await readable.wait()
                loop.remove_reader(terminal)
                shown.extend(os.read(terminal, 4096))
        del shown[: shown.index(text) + len(text)]

    try:
        await wait_for(b"you> ")
        os.write(terminal, b"forever and a day\n")
        await wait_for(b"\nforever and a day")
        process.send_signal(signal.SIGINT)
        await wait_for(b"(stopped)")
        await asyncio.wait_for(gateway.cancelled.wait(), 10)
        await wait_for(b"you> ")
        os.write(terminal, b"again\n")
        await wait_for(b"answer tokens")
        await wait_for(b"you> ")
        os.write(terminal, b"\x04")
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        loop.remove_reader(terminal)
        os.close(terminal)
        if process.returncode is None:
            process.kill()
    told = [[turn.content for turn in request.messages] for request in gateway.requests]
    assert told[1] == ["forever and a day", "forever and a day", "again"]


@pytest.mark.parametrize("address", ["", "host", ":8470", "host:", "host:http"])
async def test_what_is_no_address_is_refused_before_anything_is_asked(address):
    code, out, err = await baton("generate", "hello", "--address", address)
    assert (code, out) == (2, "")
    assert "must be host:port" in err

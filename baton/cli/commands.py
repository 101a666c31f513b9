"""The commands of `baton` and their flags."""

from __future__ import annotations

import asyncio
import codecs
import sys
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from baton.cli.chat import chat as run_chat
from baton.cli.ending import EXIT_BROKEN_PIPE, EXIT_FAILURE, EXIT_INTERRUPTED, discard_output
from baton.cli.generate import generate as run_generate
from baton.cli.generate import read_prompt, set_input
from baton.cli.request_flags import DEFAULT_ADDRESS, UINT32_MAX, UINT64_MAX, Address, RequestFlags, takes_request_flags
from baton.cli.status import show_status
from baton.core.clock import SystemClock
from baton.core.errors import ServingError, StartupError
from baton.v1.gateway_pb2 import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_MODEL = Path(".cache/models/SmolLM2-135M-Instruct")
DEFAULT_MIX = ("0.95:40-120:64", "0.05:2000-8000:128")
FILE_WIDTH = 10_000

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class LogLevel(StrEnum):
    """Least level of log lines that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"baton {version('baton-serving')}")
        raise typer.Exit


@app.callback()
def baton(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serves large language models over gRPC, with prefill and decode in separate workers."""


@app.command()
def up(  # noqa: PLR0913 flags of the command
    model: Annotated[
        Path | None, typer.Option(help=f"Model folder. Default: what the settings name, else {DEFAULT_MODEL}.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Where the gateway listens. Default: what its settings name, else 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the gateway. Default: what its settings name, else 8470."),
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="A Redis to use instead of an embedded one.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings of all components.")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least level of log lines shown.")] = LogLevel.WARNING,
    demo: Annotated[bool, typer.Option("--demo", help="Stream the answer to a sample chat when all is ready.")] = False,
) -> None:
    """Run everything on this machine: Redis, a gateway, a prefill and a decode worker.

    Starts again what dies. Ctrl-C lets running requests finish and ends all; a second Ctrl-C ends all at once.
    Settings of the components that have no flag here come from the environment (BATON_ENGINE__DTYPE=float32) or the
    YAML file.
    """
    given = {"--config": config, "--model.path": model, "--redis.url": redis_url}
    flags = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    flags += ["--telemetry.log_level", log_level]
    with _one_line_errors():
        # Here, because the other commands start faster without them.
        from baton.cli.topology import Launch
        from baton.cli.up import run

        launch = Launch(flags=flags, default_model=DEFAULT_MODEL, host=host, port=port, demo=demo)
        asyncio.run(run(launch, Console(stderr=True), SystemClock()))


@app.command()
@takes_request_flags
def chat(flags: RequestFlags) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D ends, /help shows the rest.

    With input from a pipe each line is a turn, and the exit code is 1 when one of them failed.
    """
    with _one_line_errors():
        template = flags.request()
        if flags.system is not None:
            template.messages.append(ChatMessage(role="system", content=flags.system))
        if not run_chat(flags.address, template, Console()):
            raise typer.Exit(EXIT_FAILURE)


@app.command()
@takes_request_flags
def generate(  # noqa: PLR0913 flags of the command
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    flags: RequestFlags,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="Show each token's log-probability and those of the N likeliest on standard error."),
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(min=0, help="The same for the tokens of the prompt.")] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, max=UINT32_MAX, help="How many answers; each of several is under its number."),
    ] = None,
) -> None:
    """Answer one prompt. Standard output gets the answer's text and nothing else."""
    if raw and flags.system is not None:
        raise typer.BadParameter("has no place in a --raw prompt", param_hint="--system")
    with _one_line_errors():
        request = flags.request()
        if logprobs is not None:
            request.logprobs.output_top = logprobs
        if n is not None:
            request.n = n
        if prompt_logprobs is not None:
            request.logprobs.prompt_top = prompt_logprobs
        set_input(request, read_prompt(prompt, sys.stdin), raw=raw, system=flags.system)
        asyncio.run(run_generate(flags.address, request, sys.stdout, sys.stderr))


@app.command()
def status(address: Address = DEFAULT_ADDRESS) -> None:
    """Show queues, workers and occupancy now."""
    with _one_line_errors():
        asyncio.run(show_status(address, _report_console()))


@app.command()
def plan(  # noqa: PLR0913 flags of the command
    model: Annotated[Path, typer.Argument(help="Model folder or its config.json; no weights are needed.")],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of a prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    memory: Annotated[str | None, typer.Option(help="Plan for so much memory (80GiB) instead of what is here.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings of the workers.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of both: engine.dtype=float32. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; sizes in bytes.")] = False,
) -> None:
    """Show what workers will hold of a model, how many requests fit, and what does not; nothing is loaded.

    Settings come from where the workers take them: --set, the environment, the file. Exit code 1 when it does not fit.
    """
    from baton.cli.plan import Deployment, Lengths, plan_as_json, show_plan

    flags = ["--model.path", str(model)] + (["--config", str(config)] if config is not None else [])
    flags += _setting_flags(setting or [])
    lengths = Lengths(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    with _one_line_errors():
        deployment = Deployment.load(flags, memory)
        if as_json:
            print(plan_as_json(deployment, lengths))
        else:
            show_plan(deployment, lengths, _report_console())
        if deployment.faults(lengths):
            raise typer.Exit(EXIT_FAILURE)


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Argument(help="Model folder.")] = DEFAULT_MODEL,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings of the workers.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the engine: engine.quantization=int8. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure what a precision loses against float32, on a text that comes with Baton, and what it gains.

    Settings come from where the decode worker takes them: --set, the environment, the file. Loads the model several
    times, one after the other. Exit code 1 when the loss is over the threshold.
    """
    from baton.cli.evaluation import Evaluation, evaluation_as_json, show_evaluation

    flags = ["--model.path", str(model)] + (["--config", str(config)] if config is not None else [])
    with _one_line_errors():
        evaluation = Evaluation.run(flags + _setting_flags(setting or []))
        if as_json:
            print(evaluation_as_json(evaluation))
        else:
            show_evaluation(evaluation, Console())
        if not evaluation.is_tolerable:
            raise typer.Exit(EXIT_FAILURE)


@app.command()
def simulate(  # noqa: PLR0913 flags of the command
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests that come each second.")] = 2.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 2000,
    mix: Annotated[
        list[str] | None,
        typer.Option(help="SHARE:PROMPT:OUTPUT tokens of a kind of request, and :N for N outputs. May be repeated."),
    ] = None,
    tenants: Annotated[int, typer.Option(min=1, help="Tenants who send them.")] = 1,
    flood: Annotated[float, typer.Option(min=0.001, help="The first tenant sends so much more than another.")] = 1.0,
    kv_tokens: Annotated[int, typer.Option(min=16, help="Positions in a worker's KV pool.")] = 65_536,
    swap_tokens: Annotated[int, typer.Option(min=0, help="Positions in a decode worker's swap space.")] = 8_192,
    reserved_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="gateway.limits.reserved_output_share.")
    ] = 1.0,
    sequences: Annotated[int, typer.Option(min=1, help="Most sequences of a worker.")] = 32,
    prefill_speed: Annotated[float, typer.Option(min=0.001, help="Prompt tokens a second of a worker.")] = 900.0,
    step_ms: Annotated[float, typer.Option(min=0.0, help="A decode step's time, without its sequences.")] = 18.0,
    sequence_ms: Annotated[float, typer.Option(min=0.0, help="What each sequence adds to a decode step.")] = 0.9,
    wanted_s: Annotated[float, typer.Option(min=0.0, help="Time to the first token that counts as good.")] = 1.0,
    find_ratio: Annotated[
        bool, typer.Option("--find-ratio", help="Divide the workers as serves this load best.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=UINT64_MAX, help="The same seed gives the same report.")] = 0,
) -> None:
    """Run the production schedulers, routing and queue policy on a virtual clock, with workers of any number.

    Prints percentiles, goodput and fairness. Classes are those of a gateway that is not told otherwise.
    """
    from baton.cli.simulate import Scenario
    from baton.cli.simulate import simulate as run_simulation
    from baton.sim.load import Costs, Load, Part
    from baton.sim.simulation import Fleet
    from baton.sim.workers import BLOCK_SIZE, WorkerSize

    try:
        parts = [Part.parse(text) for text in mix or DEFAULT_MIX]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mix") from None
    num_blocks = kv_tokens // BLOCK_SIZE
    for part in parts:
        if part.most_blocks(BLOCK_SIZE) > num_blocks:
            longest = f"a prompt of {part.prompt_tokens[1]} tokens of the mix with its output does not fit"
            raise typer.BadParameter(longest, param_hint="--kv-tokens")
        if part.num_choices > sequences:
            raise typer.BadParameter(f"{part.num_choices} outputs of the mix do not fit", param_hint="--sequences")
    if find_ratio and prefill + decode < 3:
        raise typer.BadParameter("needs three workers or more to divide", param_hint="--find-ratio")
    size = WorkerSize(num_blocks=num_blocks, max_num_seqs=sequences, num_swap_blocks=swap_tokens // BLOCK_SIZE)
    costs = Costs(prefill_token_s=1 / prefill_speed, decode_step_s=step_ms / 1000, decode_seq_s=sequence_ms / 1000)
    scenario = Scenario(
        fleet=Fleet(
            num_prefill=prefill,
            num_decode=decode,
            prefill=size,
            decode=size,
            costs=costs,
            reserved_output_share=reserved_share,
        ),
        load=Load(parts=parts, rate=rate, num_requests=requests, num_tenants=tenants, flood=flood, seed=seed),
        wanted_first_token_s=wanted_s,
    )
    with _one_line_errors():
        if not run_simulation(scenario, _report_console(), find_ratio=find_ratio):
            raise typer.Exit(EXIT_INTERRUPTED)


def _setting_flags(settings: list[str]) -> list[str]:
    """NAME=VALUE as the flags of a component."""
    flags = []
    for text in settings:
        name, separator, value = text.partition("=")
        if not separator:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set")
        flags += [f"--{name}", value]
    return flags


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Ends the command with one line on standard error and an exit code that is not 0."""
    try:
        yield
    except (ServingError, StartupError) as error:
        print(f"baton: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILURE) from None
    except UnicodeEncodeError as error:
        print(f"baton: {_explain_encoding(error)}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # whoever read the output is gone
        discard_output()
        raise typer.Exit(EXIT_BROKEN_PIPE) from None


def _explain_encoding(error: UnicodeEncodeError) -> str:
    if codecs.lookup(error.encoding).name == "utf-8":  # bytes of the command line that are not UTF-8: surrogates
        return "arguments must be UTF-8 text"
    return (
        f"standard output takes {error.encoding} only, and the text has more: set PYTHONIOENCODING=utf-8 or a locale"
        " such as LC_ALL=C.UTF-8"
    )


def _report_console() -> Console:
    """For tables: as wide as the terminal, and where there is none as wide as they are."""
    return Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)

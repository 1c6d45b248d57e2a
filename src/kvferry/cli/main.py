"""The command line: `kvferry demo`, `up`, `plan`, `doctor`. Heavy imports wait until a command runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import kvferry

if TYPE_CHECKING:
    from kvferry.cli.report import Reporter
    from kvferry.cli.servers import Cluster

PROBLEM_STATUS = 2
CHUNK_TOKENS = 512
PLAN_WIDTH = 400
"""Letters of a line of `kvferry plan` where it is piped: more than any of its tables has."""

app = typer.Typer(
    name="kvferry",
    help="Moves KV caches between prefill and decode engines in disaggregated LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Policy(str, Enum):
    """What the decode server does with a request whose KV did not arrive."""

    recompute = "recompute"
    fail = "fail"


class Mode(str, Enum):
    """Who moves the bytes: the decode server reads, or the prefill server writes while it computes."""

    read = "read"
    write = "write"


ModelOption = Annotated[Path | None, typer.Option("--model", help="Model directory. Default: SmolLM2-135M-Instruct.")]
TpPrefillOption = Annotated[
    int, typer.Option("--tp-prefill", min=1, help="Tensor-parallel workers of the prefill server.")
]
TpDecodeOption = Annotated[
    int, typer.Option("--tp-decode", min=1, help="Tensor-parallel workers of the decode server.")
]
TransportOption = Annotated[
    str | None, typer.Option("--transport", help="Transport, e.g. nixl, or package.module:Class. Default: the best.")
]
PolicyOption = Annotated[Policy, typer.Option("--policy", help="When KV does not arrive: compute it again, or fail.")]
ModeOption = Annotated[
    Mode, typer.Option("--mode", help="The decode server reads, or the prefill server writes while it computes.")
]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the router; 0 takes a free one.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvferry {kvferry.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: ModelOption = None,
    tp_prefill: TpPrefillOption = 1,
    tp_decode: TpDecodeOption = 1,
    transport: TransportOption = None,
    mode: ModeOption = Mode.read,
    policy: PolicyOption = Policy.recompute,
    port: PortOption = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Serve a model by a prefill and a decode server, and show that the text equals one server's.

    The status is 1 if any text differs (or no KV came from the prefill server), 2 if the demo could not run.
    """
    from kvferry.cli import demo as demonstration

    console = _console()
    with _ended_well(console), _reporter(console) as reporter:
        _check_options(transport, port)
        if json_file is not None:
            demonstration.require_writable(json_file)
        directory = _model(model, (tp_prefill, tp_decode), reporter)
        with _cluster(directory, tp_prefill, tp_decode, transport, mode, policy, port, reporter) as cluster:
            rows = demonstration.run(cluster, CHUNK_TOKENS, reporter, is_written=mode is Mode.write)
    demonstration.show(rows, console)
    if json_file is not None:
        with _ended_well(console):
            demonstration.write_json(json_file, demonstration.as_json(rows, tp_prefill, tp_decode, directory))
    raise typer.Exit(demonstration.exit_status(rows))


@app.command()
def up(
    model: ModelOption = None,
    tp_prefill: TpPrefillOption = 1,
    tp_decode: TpDecodeOption = 1,
    transport: TransportOption = None,
    mode: ModeOption = Mode.read,
    policy: PolicyOption = Policy.recompute,
    port: PortOption = 0,
) -> None:
    """Serve an OpenAI API by a prefill and a decode server behind a router, until Ctrl-C."""
    from kvferry.cli import serve

    console = _console()
    with _ended_well(console), _reporter(console) as reporter:
        _check_options(transport, port)
        directory = _model(model, (tp_prefill, tp_decode), reporter)
        with _cluster(directory, tp_prefill, tp_decode, transport, mode, policy, port, reporter) as cluster:
            serve.until_stopped(cluster, reporter)


SideText = (
    "[CONFIG,]KEY=VALUE,...: tp, pp, pp_layers (10+22), dp, dcp, interleave, block, layout, dtype, blocks, conv, ssm, "
    "model, model_id."
)


@app.command()
def plan(
    model: Annotated[Path | None, typer.Option("--model", help="config.json, or its directory, of both sides.")] = None,
    producer: Annotated[str, typer.Option("--producer", metavar="SIDE", help=f"The prefill side. {SideText}")] = "",
    consumer: Annotated[str, typer.Option("--consumer", metavar="SIDE", help="The decode side, likewise.")] = "",
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="Tokens of the request, or FIRST:END. Default: 1024.")
    ] = None,
    block_ids: Annotated[
        str | None,
        typer.Option(
            "--block-ids",
            metavar="CONSUMER:PRODUCER",
            help="Its blocks, a list for each KV cache group: [[1,2,7]]:[[4,5,9]]. Lists every descriptor.",
        ),
    ] = None,
    descriptors: Annotated[bool, typer.Option("--descriptors", help="List every descriptor.")] = False,
    case: Annotated[
        Path | None, typer.Option("--case", help="Layouts written out as JSON; docs/plan.md has the format.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only the cases with this name, or this in it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the plan into this file.")] = None,
) -> None:
    """Show what would move between two engines: which ranks, layers and heads, in how many descriptors.

    Nothing is started and no GPU is needed: a model's config.json and both sides' settings are enough, such as
    --model config.json --producer tp=2,block=64 --consumer tp=4,layout=NHD. What is left out is as in vLLM. The status
    is 1 if the two sides could not exchange their cache, and the reason is printed.
    """
    from kvferry.cli.plan.command import Options, run

    console = _console(piped_width=PLAN_WIDTH)
    options = Options(consumer, producer, model, case, name, tokens, block_ids, descriptors, as_json, svg)
    with _ended_well(console):
        status = run(options, console)
    raise typer.Exit(status)


@app.command()
def doctor() -> None:
    """Look at what kvferry needs on this machine, and say what to do about what is missing."""
    from kvferry.cli import doctor as examination

    findings = list(examination.examine())
    console = _console()
    console.print(examination.table(findings))
    for line in examination.advice(findings):
        # One line, however long: what is to be run can be copied whole.
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(finding.state is examination.State.WRONG for finding in findings) else 0)


def _console(piped_width: int = 120) -> Console:
    """Standard output; wide enough for a table's row on a line where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=piped_width)


def _model(model: Path | None, tp_sizes: tuple[int, int], reporter: Reporter) -> Path:
    from kvferry.cli import models

    return model.resolve() if model is not None else models.default_model(reporter, tp_sizes)


def _check_options(transport: str | None, port: int) -> None:
    """Before anything that takes long. Raises Problem."""
    from kvferry.cli.ports import require_free
    from kvferry.cli.servers import ROUTER, require_transport

    if port:
        require_free(port, ROUTER)
    require_transport(transport)


def _cluster(
    model: Path,
    tp_prefill: int,
    tp_decode: int,
    transport: str | None,
    mode: Mode,
    policy: Policy,
    port: int,
    reporter: Reporter,
) -> Cluster:
    from kvferry.cli.servers import Cluster, pair

    extra = {"mode": mode.value}
    specs = pair(model, tp_prefill, tp_decode, transport, policy.value, extra, max_num_batched_tokens=CHUNK_TOKENS)
    # To write pays where a router sends both legs at once; the one that does finds its servers by itself.
    return Cluster(specs, router=True, router_port=port, reporter=reporter, discovery=mode is Mode.write)


@contextlib.contextmanager
def _reporter(console: Console) -> Iterator[Reporter]:
    from kvferry.cli.report import LiveView, reporter_for

    reporter = reporter_for(console)
    if isinstance(reporter, LiveView):
        with reporter:
            yield reporter
    else:
        yield reporter


@contextlib.contextmanager
def _ended_well(console: Console) -> Iterator[None]:
    """Problems become messages with status 2, Ctrl-C status 130; signals let the block clean up first."""
    from kvferry.cli.errors import Problem
    from kvferry.cli.signals import stop_on_signals

    try:
        with stop_on_signals():
            yield
    except Problem as problem:
        for text, style in ((problem.details, "dim"), (problem.message, "bold red"), (problem.advice, "")):
            if text:
                console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(PROBLEM_STATUS) from None
    except KeyboardInterrupt:
        console.print("stopped", highlight=False)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app()

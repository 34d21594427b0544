"""The `baton` command. Each command imports what it needs when it runs, so that `--help` is fast.

Exit codes: 0 done, 2 a mistake in configuration or arguments, 1 any other failure, and an interrupt (SIGINT, SIGTERM,
SIGHUP) before the work was done. `serve` has done its work once it is ready: an interrupt after that is its regular
end, exit code 0 when everything is stopped. A second interrupt ends everything at once, exit code 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..proto import failpoints
from ..proto.errors import BatonError, ConfigError
from .cli_admin import drain, keys, role, scale, status
from .cli_bench import bench, simulate
from .cli_jobs import batch, chat
from .cli_options import (
    AddressOption,
    AuthorityOption,
    ConfigArgument,
    ConfigOption,
    JsonOption,
    KeyOption,
    PrintOption,
    SetOption,
    VerboseOption,
    check_place,
    load_config,
    one_target,
    warn,
)
from .early import prepare
from .failures import CommandFailed, error_text
from .output import say

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(f"baton {version('baton')}")
        raise typer.Exit(0)


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Serve one language model from a prefill pool and a decode pool."""
    failpoints.identify("baton")  # a mistake in BATON_FAILPOINTS is found before anything starts


@app.command(epilog="Example: baton serve configs/local.yaml --set model.dtype=float32")
def serve(
    config: ConfigArgument,
    set_: SetOption = None,
    print_config: PrintOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Start the cluster and its front door, until interrupted (a second Ctrl-C ends it at once)."""
    from . import driver
    from .model_check import check_model

    loaded = load_config(config, set_, print_config)
    facts = check_model(loaded)
    code = driver.supervise_if_needed()
    if code is None:
        from .serve import serve as run_serve

        warn(facts.warnings)
        code = driver.run(run_serve(loaded, facts, verbose))
    raise typer.Exit(code)


@app.command(epilog="Example: baton join configs/nodes.yaml --admin 10.0.0.1:50052")
def join(
    config: ConfigArgument,
    admin: Annotated[str, typer.Option("--admin", metavar="HOST:PORT", help="the administration of the cluster.")],
    set_: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Serve as one more router of a cluster that runs elsewhere, with its configuration, until interrupted."""
    from . import driver
    from .model_check import check_model

    loaded = load_config(config, set_, False)
    check_place("--admin", admin)
    facts = check_model(loaded)
    code = driver.supervise_if_needed()
    if code is None:
        from .join import join as run_join

        code = driver.run(run_join(loaded, facts, admin, verbose))
    raise typer.Exit(code)


@app.command(
    epilog='Examples: baton generate --config configs/local.yaml --chat --prompt "Hello" --report ; '
    "baton generate --address 127.0.0.1:50051 --input prompts.jsonl --max-tokens 64"
)
def generate(
    config: ConfigOption = None,
    address: AddressOption = None,
    prompt: Annotated[str | None, typer.Option(help="Raw text; with --chat a user's message.")] = None,
    input_: Annotated[Path | None, typer.Option("--input", metavar="FILE.jsonl", help="Requests, one a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Choices per prompt.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be given several times.")] = None,
    logprobs: Annotated[int | None, typer.Option(min=0, max=20, help="Alternatives per token (with --json).")] = None,
    json_: JsonOption = False,
    report: Annotated[bool, typer.Option("--report", help="Print where each phase ran and what it cost.")] = False,
    api_key: KeyOption = None,
    tls_ca: AuthorityOption = None,
    set_: SetOption = None,
    print_config: PrintOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Generate text: from one prompt, streamed, or from a file of requests, as JSON lines in input order."""
    from . import driver, requests_input
    from .access import Access

    access = Access.given(api_key, tls_ca)
    one_target(config, address, set_, print_config)
    loaded = load_config(config, set_, print_config) if config is not None else None
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling |= {"seed": seed, "n": n, "stop": stop or None, "logprobs": logprobs}
    if (prompt is None) == (input_ is None):
        raise ConfigError("give either --prompt or --input")
    if chat and input_ is not None:
        raise ConfigError("--chat goes with --prompt; a line of --input asks for the chat template with `messages`")
    if input_ is not None:
        lines = requests_input.read_lines(input_, sampling)
    else:
        text = {"messages": requests_input.chat(prompt or "")} if chat else {"prompt": prompt}
        lines = [requests_input.from_fields({**sampling, **text}, "arguments")]
    as_json = json_ or input_ is not None
    if loaded is None:
        from .generate import with_address

        raise typer.Exit(driver.run(with_address(address or "", lines, as_json, report, access=access)))
    from .model_check import check_model

    facts = check_model(loaded)
    code = driver.supervise_if_needed()
    if code is None:
        from .generate import with_cluster

        warn(facts.warnings)
        code = driver.run(with_cluster(loaded, facts, lines, as_json, report, verbose, access))
    raise typer.Exit(code)


app.command(
    epilog="Examples: baton batch questions.jsonl answers.jsonl --config configs/local.yaml ; "
    "baton batch questions.jsonl answers.jsonl --url http://127.0.0.1:8000 --in-flight 200 --retry-failed"
)(batch)
app.command(
    epilog="Examples: baton chat configs/local.yaml --local ; baton chat --address 127.0.0.1:50051 ; "
    "echo 'What is the capital of France?' | baton chat configs/local.yaml --local --temperature 0"
)(chat)
app.command(
    epilog="Examples: baton simulate configs/local.yaml --html report.html ; "
    "baton simulate configs/local.yaml --trace trace.jsonl --speed 2 --fail decode-0@30s+20s"
)(simulate)


@app.command(epilog="Example: baton doctor configs/local.yaml")
def doctor(config: ConfigArgument, set_: SetOption = None, print_config: PrintOption = False) -> None:
    """Check configuration, model, memory, ports, threads, transport and placement before a start."""
    from . import driver

    loaded = load_config(config, set_, print_config)
    code = driver.supervise_if_needed()
    if code is None:
        from .doctor import run

        code = run(loaded)
    raise typer.Exit(code)


@app.command(
    epilog="Examples: baton plan configs/teaching-7b-a100.yaml --explain ; "
    "baton plan configs/local.yaml --write plan.yaml ; "
    "baton plan configs/h100-node.yaml --set model.path=llama-3.1-70b --set workload.rate=20/s --json"
)
def plan(
    config: ConfigArgument,
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic of this model and machine.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="OUT.yaml", help="Write a configuration to serve.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Play the plans through in the simulator too.")] = False,
    json_: JsonOption = False,
    set_: SetOption = None,
    print_config: PrintOption = False,
) -> None:
    """Find the fewest workers that meet the limits: of each pool, or without disaggregation. Exit 1: there are none."""
    from .planner import command

    raise typer.Exit(command.plan(load_config(config, set_, print_config), explain, write, simulate, json_))


@app.command(epilog="Example: baton calibrate configs/local.yaml --output my-machine.yaml")
def calibrate(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(metavar="FILE.yaml", help="The hardware profile to write.")],
    repeats: Annotated[int, typer.Option(min=1, help="Times that each step is measured.")] = 5,
    cluster: Annotated[bool, typer.Option("--cluster", help="Also measure the KV's way, in a cluster.")] = False,
    api_key: KeyOption = None,
    tls_ca: AuthorityOption = None,
    set_: SetOption = None,
    print_config: PrintOption = False,
) -> None:
    """Measure the engine on this machine, fit its step times, and write a hardware profile for plan and simulate."""
    from . import driver
    from .access import Access
    from .planner import calibrate as calibrating

    access = Access.given(api_key, tls_ca)
    loaded = load_config(config, set_, print_config)
    if not cluster:
        raise typer.Exit(calibrating.run(loaded, output, repeats))
    from .model_check import check_model

    facts = check_model(loaded)
    code = driver.supervise_if_needed()
    if code is None:
        code = driver.run(calibrating.with_cluster(loaded, facts, output, repeats, access))
    raise typer.Exit(code)


@app.command(epilog="Examples: baton explain training ; baton explain roofline --model llama-3.1-8b")
def explain(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="roofline or training")],
    model: Annotated[str, typer.Option(help="A name of the catalogue, a directory, a file.")] = "teaching-7b",
) -> None:
    """Show the arithmetic of inference, or why training needs so much more memory."""
    from .planner import command

    raise typer.Exit(command.explain(topic, model))


app.command(
    epilog="Examples: baton bench --config configs/local.yaml --concurrency 8 --json ; "
    "baton bench --config configs/local.yaml --rate 2/s --compare --html report.html"
)(bench)


app.command(epilog="Example: baton status --address 127.0.0.1:50052")(status)
app.command(epilog="Example: baton keys alice --file tenants.yaml")(keys)
app.command(epilog="Example: baton drain decode-1")(drain)
app.command(epilog="Example: baton scale decode 2")(scale)
app.command(epilog="Example: baton role decode-1 prefill")(role)


def main() -> None:
    """Run the command of the arguments. Does not return."""
    try:
        app()
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"baton: {line}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(1)
    except BatonError as error:
        print(f"baton: {error_text(error)}", file=sys.stderr)
        sys.exit(1)
    except CommandFailed as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    prepare()
    main()

"""The commands `batch` and `chat`: options and what follows from them; cli.py makes them commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..proto.errors import ConfigError
from .cli_options import (
    AddressOption,
    AuthorityOption,
    ConfigOption,
    KeyOption,
    PrintOption,
    SetOption,
    VerboseOption,
    load_config,
    one_target,
    warn,
)

UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Use a running OpenAI service (router.http).")
]


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", show_default=False, help="Requests, one a line.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", show_default=False, help="Answers; appended to.")],
    config: ConfigOption = None,
    url: UrlOption = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Requests at a time; default: what keeps the cluster full.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Take the errors out of OUT and try those lines again.")
    ] = False,
    api_key: KeyOption = None,
    tls_ca: AuthorityOption = None,
    set_: SetOption = None,
    print_config: PrintOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each line of IN is {"custom_id", "method": "POST", "url": "/v1/completions" or "/v1/chat/completions", "body"}.
    Answers are appended to OUT as they come. The same command again goes on where an earlier run ended: what OUT has is
    skipped. A line that fails becomes an error in OUT, and the exit code is 1.
    """
    from . import driver
    from .access import Access
    from .batch import Job, with_cluster, with_url
    from .http_client import Origin

    access = Access.given(api_key, tls_ca)
    one_target(config, url, set_, print_config, "--url")
    loaded = load_config(config, set_, print_config) if config is not None else None
    job = Job(source, target, in_flight, retry_failed)
    job.check()
    if loaded is None:
        raise typer.Exit(driver.run(with_url(Origin.parse(url or ""), job, access)))
    from .model_check import check_model

    facts = check_model(loaded)
    code = driver.supervise_if_needed()
    if code is None:
        warn(facts.warnings)
        code = driver.run(with_cluster(loaded, facts, job, verbose, access))
    raise typer.Exit(code)


def chat(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", show_default=False)] = None,
    local: Annotated[bool, typer.Option("--local", help="Run the model in this process, without a cluster.")] = False,
    address: AddressOption = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="What the model is told beforehand.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most new tokens; default: what fits.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.001, max=1)] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1)] = 0,
    api_key: KeyOption = None,
    tls_ca: AuthorityOption = None,
    set_: SetOption = None,
    print_config: PrintOption = False,
) -> None:
    """Chat in the terminal, with the model in this process (CONFIG --local) or with a running cluster (--address).

    /reset forgets the conversation, Ctrl-C stops an answer, /quit or Ctrl-D ends. Without a terminal each line of stdin
    is a prompt, and only the answers go to stdout.
    """
    from .chat import Wanted, converse

    wanted = Wanted(max_tokens, temperature, top_p, seed)
    if local == (address is not None):
        raise ConfigError("give either CONFIG --local or --address (of `baton serve CONFIG`)")
    if address is not None:
        if config is not None:
            raise ConfigError("CONFIG goes with --local: the cluster at --address has its configuration already")
        one_target(None, address, set_, print_config)
        from .access import Access
        from .chat_remote import RemoteModel

        with RemoteModel(address, Access.given(api_key, tls_ca)) as remote:
            raise typer.Exit(converse(remote, wanted, system))
    if config is None:
        raise ConfigError("--local needs CONFIG, which names the model")
    loaded = load_config(config, set_, print_config)
    from .chat_local import LocalModel
    from .model_check import check_model

    warn(check_model(loaded).warnings)
    raise typer.Exit(converse(LocalModel.load(loaded), wanted, system))

"""`lookfar serve`: an OpenAI-compatible server with a page to look at."""

from __future__ import annotations

import os
import signal
from enum import Enum
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lookfar.cli import options
from lookfar.core import compile_ahead
from lookfar.core.progress import say_as_lines
from lookfar.errors import ConfigError
from lookfar.ranks import own_rank

if TYPE_CHECKING:
    from lookfar.lm import LM
    from lookfar.server.keys import ApiKeys

_log = getLogger("lookfar.server").info
_warn = getLogger("lookfar.server").warning
STOPPED = 128 + signal.SIGTERM  # the exit code of a server that is told to stop before it serves
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LogFormat(str, Enum):
    text = "text"
    json = "json"


ModelArgument = Annotated[str, typer.Argument(help="demo, a directory of a saved model, or a hub name.")]
Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 for any free one.")]
Name = Annotated[str | None, typer.Option("--name", help="The name of the model in the API; by default MODEL.")]
MaxBatch = Annotated[int, typer.Option(min=1, help="Answers that are decoded at once.")]
PrefillChunk = Annotated[
    int | None, typer.Option(help="Prompt tokens of one step, by default 64 on a CPU and 512 on a GPU.")
]
StoreFile = Annotated[
    Path | None,
    typer.Option("--store", help="Keep past answers to draft from in this file: read at the start, saved regularly."),
]
SaveSeconds = Annotated[float, typer.Option(help="Seconds between two saves of the store.")]
Remember = Annotated[bool, typer.Option("--remember/--no-remember", help="Draft from past answers.")]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", help="A file of API keys, a line for each: NAME KEY. LOOKFAR_API_KEYS may hold some, too."),
]
PrefixMemory = Annotated[
    float,
    typer.Option(min=0, help="GiB for the KV of past texts, so that prompts that begin alike are read once; 0: off."),
]
MaxQueue = Annotated[int, typer.Option(help="Answers that may wait for a place; then 429.")]
Timeout = Annotated[float, typer.Option(help="Seconds that a request may take, waiting included.")]
Drain = Annotated[float, typer.Option(help="Seconds that running requests get when the server is stopped.")]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(help="A host name that clients may use. On localhost only its own names, by default."),
]
Cors = Annotated[list[str] | None, typer.Option("--cors", help="An origin whose pages may use the API. Repeatable.")]
Logs = Annotated[LogFormat, typer.Option("--log", help="How to write the log.")]
Warm = Annotated[bool, typer.Option("--warmup/--no-warmup", help="Measure, compile and capture before serving.")]


def serve(
    model: ModelArgument = "demo",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    strategy: options.StrategyName = None,
    settings: options.Settings = None,
    budget: options.Budget = None,
    store: StoreFile = None,
    save_seconds: SaveSeconds = 60.0,
    remember: Remember = True,
    keys: Keys = None,
    max_batch: MaxBatch = 8,
    max_length: options.MaxLength = None,
    prefill_chunk: PrefillChunk = None,
    prefix_memory: PrefixMemory = 1.0,
    share: options.Share = None,
    max_queue: MaxQueue = 256,
    timeout: Timeout = 600.0,
    drain: Drain = 30.0,
    allowed_host: AllowedHost = None,
    cors: Cors = None,
    log: Logs = LogFormat.text,
    warmup: Warm = True,
    pack: options.Pack = None,
    compile: options.Compile = False,
    exact: options.Exact = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Serve MODEL with an API like OpenAI's, and a page at /. Ctrl-C or SIGTERM finishes running requests and stops."""
    _prepare()
    from lookfar.server.config import ServerConfig
    from lookfar.server.keys import load_keys
    from lookfar.server.logs import set_up_logs
    from lookfar.server.serving import serve_forever

    known = load_keys(keys)
    hosts = allowed_host or (LOOPBACK if host in LOOPBACK and not known.required else ())
    config = ServerConfig(
        model_name=name or model,
        max_queue=max_queue,
        request_timeout=timeout,
        prefix_bytes=int(prefix_memory * (1 << 30)),
        drain_seconds=drain,
        store=store,
        save_seconds=save_seconds,
        share=share,
        allowed_hosts=tuple(one.lower() for one in hosts),
        cors_origins=tuple(cors or ()),
    )
    set_up_logs(log.value)
    _check_address(host, port, known)
    chosen = options.strategies(strategy, settings), options.rows(budget)
    how = options.ModelOptions(device, dtype, max_length, None, pack, compile, exact)
    lm = _load(model, how, max_batch, prefill_chunk)
    options.speculate(lm, *chosen)
    lm.remember = remember
    _warm_up(lm, warmup)
    serve_forever(lm, config, known, (host, port))


def _prepare() -> None:
    """Check that the server's packages are installed, and begin to compile. The log says what takes time."""
    # The first process of a container has no default action for signals.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))
    say_as_lines(False)
    compile_ahead.start()
    try:
        import lookfar.server.app  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"The server needs {error.name}: pip install 'lookfar[serve]'.") from None


def _check_address(host: str, port: int, keys: ApiKeys) -> None:
    from lookfar.server.run import check_address

    if own_rank() == 0:
        check_address(host, port)
    if host not in LOOPBACK and not keys.required:
        _warn("Everyone who can reach %s can use this server: give it --keys or LOOKFAR_API_KEYS.", host)


def _load(model: str, given: options.ModelOptions, max_batch: int, prefill_chunk: int | None) -> LM:
    import torch

    _log("Loading %s", model)
    on_cpu = (given.device or "").startswith("cpu") or not torch.cuda.is_available()
    return options.load(
        model, max_batch=max_batch, prefill_chunk=prefill_chunk or (64 if on_cpu else 512), **vars(given)
    )


def _warm_up(lm: LM, wanted: bool) -> None:
    if wanted:
        _log("Warming up")
        lm.warmup(sampling=True)

"""`lookfar chat`: a conversation in the terminal, coloured by step, with the speed of every answer."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from lookfar.cli import options
from lookfar.cli.conversation import Conversation
from lookfar.cli.remote import Key

System = Annotated[str | None, typer.Option(help="The system message.")]


Url = Annotated[str | None, typer.Option(help="Talk with the model of a server, as in http://127.0.0.1:8000.")]


def chat(
    model: options.Model = "demo",
    url: Url = None,
    key: Key = None,
    system: System = None,
    strategy: options.StrategyName = None,
    settings: options.Settings = None,
    budget: options.Budget = None,
    store: options.StoreFile = None,
    share: options.Share = None,
    pack: options.Pack = None,
    compile: options.Compile = False,
    exact: options.Exact = None,
    max_new_tokens: options.MaxNewTokens = 512,
    max_length: options.MaxLength = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Talk with MODEL. Ctrl-C stops an answer, /help shows the commands, Ctrl-D or /exit ends it."""
    if url is None:
        options.prepare()
    chosen, rows = options.strategies(strategy, settings), options.rows(budget)
    sampling = options.sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history while typing
    if url is not None:
        from lookfar.cli.remote import Server
        from lookfar.cli.remote_chat import RemoteConversation

        generation = {"max_tokens": max_new_tokens, "budget": rows, **sampling}
        _converse(RemoteConversation(Server(url, key), system, generation, strategy))
        return
    how = options.ModelOptions(device, dtype, max_length, store, pack, compile, exact, share)
    lm = options.load_model(model, how)
    lm.chat_ids([{"role": "user", "content": "Hi"}])  # fails now if the model has no chat template
    with contextlib.suppress(KeyboardInterrupt):  # the first answer is only slower without it
        lm.warmup(requests=1, length=4 * max_new_tokens, sampling=bool(sampling))
    lm.driver.works_when_idle = True
    _converse(Conversation(lm, system, {"max_new_tokens": max_new_tokens, "budget": rows, **sampling}, chosen))


def _converse(talk: Conversation) -> None:
    """Answer what is typed until the end."""
    talk.out.print("[dim]/help shows the commands; Ctrl-C stops an answer, Ctrl-D ends the chat.[/]")
    while True:
        try:
            line = input("› ").strip()
        except KeyboardInterrupt:
            talk.out.print()
            continue
        except EOFError:
            talk.out.print()
            return
        if line in ("/exit", "/quit"):
            return
        if line:
            try:
                talk.take(line)
            except KeyboardInterrupt:  # whenever it comes, the conversation so far is kept
                talk.out.print("\n[dim]Stopped; the conversation is as it was before this message.[/]")

"""`lookfar chat --url`: the same conversation with a model on a server."""

from __future__ import annotations

from contextlib import suppress
from itertools import cycle
from secrets import token_hex
from time import perf_counter
from typing import Any

from rich.text import Text

from lookfar.cli.answers import interrupts
from lookfar.cli.colours import COLOURS
from lookfar.cli.conversation import Conversation
from lookfar.cli.remote import Server

CHAT = "/v1/chat/completions"


class RemoteConversation(Conversation):
    """Sends the whole conversation with every message; the server finds its beginning in its prefix cache."""

    strategy: str | None

    def __init__(self, server: Server, system: str | None, generation: dict[str, Any], strategy: str | None) -> None:
        super().__init__(None, system, generation, strategy)
        self.server = server
        self.model = server.get("/v1/models")["data"][0]["id"]
        self.headers = {"X-Conversation-Id": token_hex(8)}  # a proxy sends all of it to one replica (docs/scaling.md)
        self.used: list[tuple[dict[str, Any], float, float]] = []  # usage, seconds to the first token, seconds

    def answer(self, message: str) -> None:
        asked = [*self.messages, {"role": "user", "content": message}]
        body = {"model": self.model, "messages": asked, "stream": True, "stream_options": {"include_usage": True}}
        chosen = {"strategy": self.strategy, "budget": self.generation["budget"]}
        options = {name: value for name, value in chosen.items() if value is not None}
        more = {"lookfar": options} if options else {}
        sampling = {name: value for name, value in self._next_generation().items() if name != "budget"}
        text, usage, colours = "", None, cycle(COLOURS)
        began, first = perf_counter(), 0.0
        with suppress(KeyboardInterrupt), interrupts() as interrupted:  # a second Ctrl-C does not wait for a chunk
            for chunk in self.server.stream(CHAT, body | sampling | more, self.headers):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    first = first or (perf_counter() - began if piece else 0.0)
                    self.out.print(Text(piece, style=next(colours)), end="", soft_wrap=True)
                    text += piece
                if interrupted.is_set():
                    break
        self.out.print()
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if usage is not None:
            self.used.append((usage, first, perf_counter() - began))
            self.out.print(f"[dim]{_summary(*self.used[-1])}[/]", soft_wrap=True)

    @property
    def num_answers(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)

    def speed(self, _: str) -> None:
        for number, one in enumerate(self.used, start=1):
            self.out.print(f"[bold]{number}[/] {_summary(*one)}", soft_wrap=True)
        if not self.used:
            self.out.print("[dim]No answer yet.[/]")

    def change_strategy(self, name: str) -> None:
        self.strategy = name or self.strategy
        self.out.print(f"[dim]strategy: {self.strategy or 'that of the server'}[/]")


def _summary(usage: dict[str, Any], first: float, seconds: float) -> str:
    tokens, ours = usage["completion_tokens"], usage.get("lookfar")
    steps = f" in {ours['steps']} steps: {ours['tokens_per_step']:.2f} tokens per step" if ours else ""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return (
        f"{tokens} tokens{steps}, {tokens / seconds:.1f} tokens/s, first after {first:.2f} s, "
        f"{cached} of {usage['prompt_tokens']} prompt tokens were cached"
    )

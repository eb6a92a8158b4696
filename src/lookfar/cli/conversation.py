"""A conversation in the terminal: its messages and its commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lookfar.cli import options
from lookfar.errors import LookfarError

if TYPE_CHECKING:
    from lookfar.drafters.registry import StrategySpec
    from lookfar.engine.stats import Stats
    from lookfar.lm import LM
    from lookfar.streams import Chunk


class Conversation:
    """The messages so far, and the commands of the chat."""

    def __init__(self, lm: Any, system: str | None, generation: dict[str, Any], strategy: StrategySpec) -> None:
        self.lm: LM = lm
        self.out = Console(highlight=False)
        self.first = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.first)
        self.generation = generation
        self.strategy = strategy
        self.answers: list[tuple[Stats, float]] = []  # each with the seconds to its first token
        self.known: tuple[list[int], str] = [], ""  # what the model has read and written, as tokens and as text
        self.commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/speed": (self.speed, "the speed of every answer"),
            "/strategy": (self.change_strategy, "NAME: draft in another way, e.g. none, suffix, auto"),
            "/save": (self.save, "FILE: write the conversation as JSON"),
            "/reset": (self.reset, "start a new conversation"),
            "/help": (self.help, "this list"),
        }

    def take(self, line: str) -> None:
        """Run a command or answer a message; a mistake is one sentence and the conversation goes on."""
        name, _, rest = line.partition(" ")
        try:
            if name in self.commands:
                self.commands[name][0](rest.strip())
            elif name.startswith("/") and " " not in line:
                options.say("Error", f"There is no {name}; /help shows the commands.", "red")
            else:
                self.answer(line)
        except LookfarError as error:
            options.say("Error", str(error), "red")

    def answer(self, message: str) -> None:
        from lookfar.cli.answers import show_answer, summary

        asked = [*self.messages, {"role": "user", "content": message}]
        rendered = self.lm.chat_text(asked)
        prompt = self._ids(rendered)
        emitted: list[int] = []
        began, first = perf_counter(), 0.0
        stream = self.lm.stream(prompt, strategy=self.strategy, reuse=True, **self._next_generation())

        def collect(chunk: Chunk) -> None:
            nonlocal first
            first = first or perf_counter() - began
            emitted.extend(chunk.token_ids)

        text, last, stopped = show_answer(stream, self.out, collect)
        if last is None:
            self.out.print("[dim]Stopped before the first token.[/]")
            return
        assert self.lm.tokenizer is not None
        self.messages = [*asked, {"role": "assistant", "content": text}]
        self.known = prompt + emitted, rendered + str(self.lm.tokenizer.decode(emitted))
        self.answers.append((last.stats, first))
        ended = "stopped" if stopped else last.finish_reason
        known = f"{last.stats.reused_tokens} of {last.stats.prompt_tokens} prompt tokens were cached"
        line = f"{summary(last.stats)} ({ended}), first after {first:.2f} s, {known}"
        self.out.print(f"[dim]{line}[/]", soft_wrap=True)

    def _ids(self, rendered: str) -> list[int]:
        """Return the conversation's tokens: those that were read and emitted so far, and the new ones.

        Tokenized again, an answer may become other tokens than the model's own, and would have to be prefilled again.
        """
        ids, text = self.known
        if text and rendered.startswith(text):
            return ids + self.lm.template_ids(rendered[len(text) :])
        return self.lm.template_ids(rendered)

    def _next_generation(self) -> dict[str, Any]:
        """Return the options of the next answer; each has a seed of its own, so that a conversation can be repeated."""
        seed = self.generation.get("seed")
        return self.generation | ({"seed": seed + self.num_answers} if seed is not None else {})

    @property
    def num_answers(self) -> int:
        return len(self.answers)

    def speed(self, _: str) -> None:
        from lookfar.cli.answers import summary

        for number, (stats, first) in enumerate(self.answers, start=1):
            accepted = (f"{d.accepted} of {d.proposed} from {name}" for name, d in stats.drafters.items())
            self.out.print(f"[bold]{number}[/] {summary(stats)}, first after {first:.2f} s", soft_wrap=True)
            self.out.print(f"  [dim]accepted drafts: {', '.join(accepted) or 'no drafts'}[/]", soft_wrap=True)
        if not self.answers:
            self.out.print("[dim]No answer yet.[/]")

    def change_strategy(self, name: str) -> None:
        from lookfar.drafters.registry import name_of, parse_strategy

        if name:
            self.strategy = parse_strategy(name)
        now = self.lm.strategy if self.strategy is None else parse_strategy(self.strategy)
        self.out.print(f"[dim]strategy: {name_of(now)}[/]")

    def save(self, name: str) -> None:
        if not name:
            options.say("Error", "Give a file, as in /save chat.json.", "red")
            return
        try:
            Path(name).write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            options.say("Error", f"{name} cannot be written: {error.strerror}.", "red")
            return
        self.out.print(f"[dim]{len(self.messages)} messages in {name}[/]")

    def reset(self, _: str) -> None:
        self.messages, self.known = list(self.first), ([], "")
        self.out.print("[dim]a new conversation[/]")

    def help(self, _: str) -> None:
        for name, (_do, what) in self.commands.items():
            self.out.print(f"[bold]{name}[/] {what}")
        self.out.print("[bold]/exit[/] or Ctrl-D ends the chat, Ctrl-C stops an answer")

"""`lookfar chat`: what is typed, what comes back, and what is kept."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from families import tiny_model
from helpers import byte_tokenizer
from lookfar import LM
from lookfar.cli import main
from lookfar.cli.conversation import Conversation


@pytest.fixture
def lm() -> LM:
    """A model that says readable nonsense."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    lm = LM(tiny_model("llama", torch.float32, vocab_size=len(tokenizer)), tokenizer)
    lm.stream = partial(lm.stream, regex="[a-zé ]{99}")  # type: ignore[method-assign]
    return lm


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, lm: LM) -> Iterator[Any]:
    """Runs the command with lines typed into it; returns its exit code."""
    monkeypatch.setattr("lookfar.cli.options.load_model", lambda *_: lm)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*lines: str | type[BaseException], options: tuple[str, ...] = ()) -> int:
        waiting = iter(lines)

        def read(prompt: str) -> str:
            line = next(waiting, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "argv", ["lookfar", "chat", "--max-new-tokens", "20", *options])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    import warnings

    with warnings.catch_warnings():
        yield run


def test_a_conversation(typed: Any, lm: LM, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = [
        "Hello",
        "",
        KeyboardInterrupt,
        "And now?",
        "/speed",
        "/strategy",
        "/strategy none",
        "More",
        f"/save {file}",
    ]
    assert typed(*lines, "/exit") == 0
    shown = capsys.readouterr().out
    messages = json.loads(file.read_text())
    assert [m["role"] for m in messages] == ["user", "assistant"] * 3
    assert [m["content"] for m in messages[::2]] == ["Hello", "And now?", "More"]
    assert all(messages[i]["content"] in shown for i in (1, 3, 5))
    assert shown.count("first after") == 3 + 2  # after each answer, and /speed after two
    assert "strategy: auto" in shown
    assert "strategy: none" in shown
    assert "6 messages in" in shown


def test_answers_are_those_of_the_whole_conversation(lm: LM) -> None:
    """What is kept in the cache between turns changes no token, and is not read again."""
    talk = Conversation(lm, "Be brief.", {"max_new_tokens": 20}, None)
    for line in ("Hello", "And now?", "Grüße 🌍", "Bye"):
        before = len(talk.known[0])
        talk.take(line)
        prompt = lm.chat_text(talk.messages[:-1])
        stats, _ = talk.answers[-1]
        fresh = LM(lm.model, lm.tokenizer).generate(
            talk.known[0][: stats.prompt_tokens], max_new_tokens=20, regex="[a-zé ]{99}"
        )
        assert fresh.token_ids == talk.known[0][stats.prompt_tokens :]
        assert lm.tokenizer.decode(talk.known[0][: stats.prompt_tokens]) == prompt
        if before:
            assert stats.reused_tokens == before - 1


def test_a_template_that_rewrites_answers_is_prefilled_again(lm: LM) -> None:
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content|upper }}\n{% endfor %}assistant:"
    talk = Conversation(lm, None, {"max_new_tokens": 20}, None)
    talk.take("Hello")
    talk.take("And now?")
    stats, _ = talk.answers[-1]
    assert talk.known[0][: stats.prompt_tokens] == lm.chat_ids(talk.messages[:-1])
    assert 0 < stats.reused_tokens < stats.prompt_tokens - 10


def test_ctrl_c_stops_the_answer_and_not_the_program(
    typed: Any, lm: LM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps: list[int] = []
    lm.warmup(requests=1)
    launch = lm.engine.runner.launch

    def interrupted(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)  # during a step
        return launch(*arguments)

    monkeypatch.setattr(lm.engine.runner, "launch", interrupted)
    file = tmp_path / "chat.json"
    before = signal.getsignal(signal.SIGINT)
    assert typed("Hello", "Go on", f"/save {file}", options=("--strategy", "none")) == 0
    shown = capsys.readouterr().out
    assert shown.count("(stopped)") == 1
    stopped = re.search(r"(\d+) tokens in \1 steps: .*\(stopped\)", shown)
    assert stopped is not None
    assert 1 <= int(stopped[1]) <= 5  # the chunk after Ctrl-C, or the next one
    assert "20 tokens in 20 steps" in shown
    messages = json.loads(file.read_text())
    assert len(messages) == 4
    assert lm.engine.scheduler.is_idle
    assert signal.getsignal(signal.SIGINT) is before


def test_seeds_make_a_conversation_repeatable(lm: LM) -> None:
    said = []
    for _ in range(2):
        talk = Conversation(lm, None, {"max_new_tokens": 15, "temperature": 1.5, "seed": 3}, None)
        talk.take("Hello")
        talk.take("Hello")
        said.append([m["content"] for m in talk.messages])
    assert said[0] == said[1]
    assert said[0][1] != said[0][3]


def test_mistakes_do_not_end_it(typed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "where.json"
    assert (
        typed("/nothing", "/save", f"/save {nowhere}", "/strategy magic", "/speed", "/help", "x" * 400, "/reset") == 0
    )
    captured = capsys.readouterr()
    assert "There is no /nothing" in captured.err
    assert "Give a file" in captured.err
    assert "cannot be written" in captured.err
    assert "Unknown strategy 'magic'" in captured.err
    assert "do not fit" in captured.err
    assert "No answer yet" in captured.out
    assert "/strategy NAME" in captured.out
    assert "a new conversation" in captured.out


def test_a_model_that_cannot_chat_says_so_first(typed: Any, lm: LM, capsys: pytest.CaptureFixture[str]) -> None:
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = None
    assert typed("Hello") == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_second_ctrl_c_does_not_wait_for_the_step_and_keeps_the_conversation(
    typed: Any, lm: LM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lm.warmup(requests=1)
    launch, steps, released = lm.engine.runner.launch, [], Event()

    def stuck(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 25:  # in the second answer, a step that takes long
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            released.wait(20)
        return launch(*arguments)

    monkeypatch.setattr(lm.engine.runner, "launch", stuck)
    monkeypatch.setattr("lookfar.cli.conversation.Conversation.save", saving(released, Conversation.save))
    file = tmp_path / "chat.json"
    before = signal.getsignal(signal.SIGINT)
    assert typed("Hello", "Go on", f"/save {file}", "More", f"/save {file}", options=("--strategy", "none")) == 0
    assert [m["content"] for m in json.loads(file.read_text())[::2]] == ["Hello", "Go on", "More"]
    assert capsys.readouterr().out.count("20 tokens in 20 steps") == 2
    assert signal.getsignal(signal.SIGINT) is before


def saving(released: Event, save: Any) -> Any:
    """Return a `/save` that notes that the chat has gone on, while the step is still running."""

    def wrapped(self: Conversation, name: str) -> None:
        released.set()
        save(self, name)

    return wrapped


def test_ctrl_c_at_any_other_moment_keeps_the_conversation(
    typed: Any, lm: LM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    encode, calls = lm.chat_text, []

    def interrupted(messages: Any) -> str:
        calls.append(1)
        if len(messages) == 3 and len(calls) < 4:
            raise KeyboardInterrupt
        return encode(messages)

    monkeypatch.setattr(lm, "chat_text", interrupted)
    file = tmp_path / "chat.json"
    assert typed("Hello", "Lost", "Again", f"/save {file}") == 0
    assert [m["content"] for m in json.loads(file.read_text())[::2]] == ["Hello", "Again"]
    assert "Stopped; the conversation is as it was" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ctrl_c_in_a_terminal(lm: LM, tmp_path: Path) -> None:
    """A real terminal and real keys: two Ctrl-C in an answer, then another message, and all is saved."""
    pty = pytest.importorskip("pty")
    assert lm.tokenizer is not None
    long = tiny_model("llama", torch.float32, vocab_size=len(lm.tokenizer), max_position_embeddings=4096)
    long.save_pretrained(tmp_path / "tiny")
    lm.tokenizer.save_pretrained(tmp_path / "tiny")
    file = tmp_path / "chat.json"
    child, leader = pty.fork()
    if child == 0:
        os.environ |= {"OMP_NUM_THREADS": "1", "LOOKFAR_CACHE": str(tmp_path), "TERM": "xterm"}
        code = (
            "from lookfar.core import compile_ahead; compile_ahead.is_compiled = lambda: True\n"
            "import lookfar.cli; lookfar.cli.main()"
        )
        arguments = ["chat", "--model", str(tmp_path / "tiny"), "--strategy", "none", "--max-new-tokens", "400"]
        os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
    screen = bytearray()

    def wait_for(words: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while words.encode() not in screen:
            assert time.monotonic() < end, screen.decode(errors="replace")
            if select.select([leader], [], [], 0.2)[0]:
                screen.extend(os.read(leader, 4096))

    def press(keys: str) -> None:
        screen.clear()
        os.write(leader, keys.encode())

    try:
        wait_for("› ")
        press("Hello\r")
        time.sleep(0.05)
        os.write(leader, b"\x03\x03")
        wait_for("› ")
        press("Again\r")
        wait_for("tokens/s")
        press(f"/save {file}\r")
        wait_for("messages in")
        press("/exit\r")
        assert os.waitpid(child, 0)[1] == 0
    finally:
        os.close(leader)
    assert "Again" in [m["content"] for m in json.loads(file.read_text())]

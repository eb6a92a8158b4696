"""Several ranks, each a process: the tokens of `generate`, requests that come and go, and ranks that end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from families import tiny_model
from helpers import byte_tokenizer, wait_until
from lookfar.lm import LM
from lookfar.models.pretrained import load_pretrained
from rank_group import finish, run_ranks, started_ranks
from redis_server import free_port

SCENARIOS = str(Path(__file__).parent / "scenarios.py")
FAMILIES = ("qwen3", "gemma3_text", "gpt_neox", "phi3", "bloom", "mixtral")


def scenario(ranks: int, *arguments: str) -> Any:
    """Run a scenario that has to succeed on all ranks; returns what rank 0 found."""
    ended = run_ranks(ranks, SCENARIOS, *arguments)
    assert [code for code, _, _ in ended] == [0] * ranks, ended
    return json.loads(ended[0][1].splitlines()[-1])


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_tokens_are_those_of_generate(ranks: int) -> None:
    found = scenario(ranks, "exact", "llama")["llama"]
    assert found["wrong"] == []
    assert found["kind"] == f"flat on {ranks} ranks"
    assert 0 < found["bytes"] / found["steps"] < 4000 * (ranks - 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_tokens_of_other_families_are_those_of_generate(ranks: int) -> None:
    found = scenario(ranks, "exact", *FAMILIES)
    assert {family: of_family["wrong"] for family, of_family in found.items()} == {family: [] for family in FAMILIES}


@pytest.mark.real
@pytest.mark.slow
def test_the_tokens_of_the_demo_model() -> None:
    found = scenario(2, "demo")
    assert found == dict.fromkeys(("alone", "batch", "window", "sampled"), True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_requests_come_and_go(ranks: int) -> None:
    found = scenario(ranks, "life")
    assert found == dict.fromkeys(found, True)


@pytest.mark.slow
def test_a_model_whose_drafts_are_chains_is_decoded_by_rank_0() -> None:
    (code, out, err), (other, _, _) = run_ranks(2, SCENARIOS, "attached", "lfm2")
    assert (code, other) == (0, 0), err
    assert json.loads(out) == {"right": True, "kind": "eager"}
    assert "lfm2 decodes on rank 0 alone: its drafts are verified as one chain, which has no branches to share." in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("model", "Rank 1 has another model than rank 0"),
        ("generates", "Rank 1 follows rank 0: call generate on rank 0, and parallel.follow here."),
        ("changes", "The model was changed on rank 0 and not on rank 1: start all ranks with the new one."),
    ],
)
def test_mistakes_end_in_one_sentence(mistake: str, said: str) -> None:
    ended = run_ranks(2, SCENARIOS, "attached", "llama", mistake)
    assert ended[0][0] != 0
    assert said in "".join(err for _, _, err in ended)
    assert not any("Traceback" in err for _, _, err in ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "victim", "with_signal"),
    [(2, 1, signal.SIGKILL), (3, 2, signal.SIGKILL), (2, 1, signal.SIGSTOP), (2, 0, signal.SIGKILL)],
    ids=["killed", "one of three", "stopped", "rank 0"],
)
def test_a_rank_that_is_gone_ends_the_group(ranks: int, victim: int, with_signal: signal.Signals) -> None:
    with started_ranks(ranks, SCENARIOS, "endless") as processes:
        assert processes[0].stdout is not None
        assert processes[0].stdout.readline() == "ready\n"
        time.sleep(1)
        processes[victim].send_signal(with_signal)
        survivors = [process for process in processes if process is not processes[victim]]
        codes = [process.wait(timeout=60) for process in survivors]
        processes[victim].kill()
        ended = finish(processes)
    assert 0 not in codes
    reason = "did not answer within 15 seconds" if with_signal == signal.SIGSTOP else "has ended"
    said = "".join(err for i, (_, _, err) in enumerate(ended) if i != victim)
    assert said.count(f"Rank {victim} {reason}: start all ranks again.") == 1
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model with a tokenizer."""
    folder = str(tmp_path_factory.mktemp("saved") / "model")
    tiny_model("llama", vocab_size=300).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_torchrun_starts_the_command_line(saved: str) -> None:
    command = ["-m", "lookfar", "generate", "hello hello", "--model", saved, "--json", "--max-new-tokens", "40"]
    alone = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, check=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *command]
    shared = subprocess.run(torchrun, capture_output=True, text=True, timeout=200, check=True)
    (line,) = shared.stdout.splitlines()  # rank 0 speaks for all
    assert json.loads(line)["token_ids"] == json.loads(alone.stdout)["token_ids"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "demo"), "lookfar check runs in one process: start it without torchrun"),
        (("generate", "a", "--model", "{saved}/nowhere"), "nowhere"),
        (("generate", "a", "--model", "{saved}", "--strategy", "magic"), "magic"),
        (("generate", "a", "--model", "{saved}", "--device", "auto"), "Each rank takes a GPU of its own"),
    ],
)
def test_mistakes_on_the_command_line_are_said_once(saved: str, arguments: tuple[str, ...], said: str) -> None:
    command = [argument.format(saved=saved) for argument in arguments]
    ended = run_ranks(2, "-m", "lookfar", *command)
    assert ended[0][0] == 2
    assert said in ended[0][2]
    assert len([line for line in ended[0][2].splitlines() if not line.endswith("…")]) == 1  # others: what it waits for
    assert ended[1][1:] == ("", "")


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(saved: str) -> None:
    command = ("-m", "lookfar", "generate", "hello", "--model", saved, "--max-new-tokens", "200", "--budget", "1")
    with started_ranks(2, *command, PYTHONUNBUFFERED="1") as processes:
        assert processes[0].stdout is not None
        assert processes[0].stdout.read(1)  # it has begun
        for process in processes:
            process.send_signal(signal.SIGINT)
        ended = finish(processes)
    assert [code for code, _, _ in ended] == [0, 0]
    assert "stopped" in ended[0][2] or "length" in ended[0][2]


@pytest.mark.slow
def test_a_server_on_two_ranks_answers_and_finishes_when_it_is_told_to_stop(saved: str) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = ("-m", "lookfar", "serve", saved, "--port", str(port), "--budget", "8", "--no-warmup")
    body = {"model": saved, "prompt": "hello hello", "max_tokens": 40, "temperature": 0}
    with started_ranks(2, *command) as processes, httpx.Client(base_url=url, timeout=120) as client:
        wait_until(lambda: _is_up(client), 120)
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda _: client.post("/v1/completions", json=body).json(), range(3)))
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(client.post, "/v1/completions", json={**body, "max_tokens": 150})
            time.sleep(0.3)
            for process in processes:
                process.send_signal(signal.SIGTERM)
            assert last.result().json()["usage"]["completion_tokens"] == 150
        ended = finish(processes)
    assert [code for code, _, _ in ended] == [0, 0], ended
    alone = LM(*load_pretrained(saved, "cpu", None))
    expected = alone.generate("hello hello", max_new_tokens=40).text
    assert [answer["choices"][0]["text"] for answer in answers] == [expected] * 3


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False

"""Several positions drawn at once have the numbers of draws one after the other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookfar.sampling import noise_draws
from lookfar.sampling.noise import SamplingNoise
from lookfar.sampling.noise_draws import AHEAD, NoiseDraws, states_between


@pytest.mark.parametrize("shape", [(1, 1, 1000), (3, 2, 500)])
def test_draws_on_a_cpu(shape: tuple[int, int, int]) -> None:
    expected = torch.Generator().manual_seed(5)
    start = expected.get_state()
    noise, states = NoiseDraws(torch.device("cpu")).draw(start, shape)
    for part, state in zip(noise, states, strict=True):
        assert torch.equal(part, torch.empty(shape[1:]).exponential_(1, generator=expected))
        assert torch.equal(state, expected.get_state())


def test_states_in_between_are_equally_far_apart() -> None:
    start, end = (torch.from_numpy(np.array([seed, offset]).view(np.uint8)) for seed, offset in ((7, 12), (7, 36)))
    found = [state.numpy().view(np.int64).tolist() for state in states_between(start, end, 3)]
    assert found == [[7, 20], [7, 28], [7, 36]]


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "width"), [(1, 49152), (1, 1000), (3, 32000)])
def test_draws_on_a_gpu_as_one_graph(batch: int, width: int) -> None:
    """First one by one, then in a graph, from any state, and in the right places of the noise of a call."""
    device, shape = torch.device("cuda"), (AHEAD, batch, width)
    draws, generator = NoiseDraws(device), torch.Generator(device)
    for attempt, seed in enumerate((1, 2, 3, 2)):
        generator.manual_seed(seed)
        if attempt == 3:
            generator.set_offset(400)
        noise, states = draws.draw(generator.get_state(), shape)
        for part, state in zip(noise, states, strict=True):
            assert torch.equal(part, torch.empty(batch, width, device=device).exponential_(1, generator=generator))
            assert torch.equal(state, generator.get_state())
    assert any(graph is not None for graph in noise_draws._graphs.values())
    torch.manual_seed(11)
    of_call = SamplingNoise(batch, device)
    found = [of_call.at(position, 0, width).clone() for position in (0, 5, 20)]
    of_call.finish(21)
    after = torch.cuda.get_rng_state()
    torch.manual_seed(11)
    expected = [torch.empty(batch, width, device=device).exponential_()[0] for _ in range(21)]
    assert all(torch.equal(part, expected[place]) for part, place in zip(found, (0, 5, 20), strict=True))
    assert torch.equal(torch.cuda.get_rng_state(), after)


@pytest.mark.gpu
def test_the_coming_noise_is_copied_from_a_gpu() -> None:
    torch.manual_seed(4)
    noise = SamplingNoise(2, torch.device("cuda"))
    noise.at(0, 0, 3000)
    for head in (0, 3, 4, 11, 30):
        noise.advance(1, head)
        noise.fetch(1)
        noise.prefetch(1)
        torch.cuda.synchronize()
        for place in range(head, head + 2 * noise.look_ahead):
            own = noise.upcoming[1, place % noise.upcoming.shape[1]]
            assert (own == noise.at(place, 1, 3000).cpu().numpy()).all()


def test_what_cannot_be_captured_is_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int, int]] = []

    def fail(device: torch.device, shape: tuple[int, int, int]) -> None:
        tried.append(shape)
        raise RuntimeError("capture failed")

    monkeypatch.setattr(noise_draws, "DrawingGraph", fail)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(stream_id=-1))
    for _ in range(3):
        assert noise_draws._graph_for(torch.device("cpu"), (2, 1, 7)) is None
    assert tried == [(2, 1, 7)]


@pytest.mark.parametrize("kept", [1 << 20, 5 * 2 * 40 * 4])  # bytes: everything, or five positions
def test_noise_that_is_drawn_ahead(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: every position has its own numbers, is copied to its place, and is drawn once if there is room."""
    monkeypatch.setattr(NoiseDraws, "positions", lambda *_: 3)
    monkeypatch.setattr("lookfar.sampling.noise.KEPT_BYTES", kept)
    drawn: list[int] = []
    draw = NoiseDraws.draw
    monkeypatch.setattr(
        NoiseDraws, "draw", lambda self, state, shape: drawn.append(shape[0]) or draw(self, state, shape)
    )
    torch.manual_seed(11)
    expected = [torch.empty(2, 40).exponential_() for _ in range(25)]
    after = torch.get_rng_state()
    torch.manual_seed(11)
    noise = SamplingNoise(2, torch.device("cpu"))
    for place in (0, 4, 1, 9, 5):
        assert torch.equal(noise.at(place, 1, 40), expected[place][1])
    for head in (0, 3, 4, 11):
        noise.advance(1, head)
        noise.fetch(1)
        for place in range(head, head + noise.look_ahead):
            assert (noise.upcoming[1, place % noise.upcoming.shape[1]] == expected[place][1].numpy()).all()
    noise.finish(25)
    assert torch.equal(torch.get_rng_state(), after)
    assert kept < 1 << 20 or drawn == [3] * 9

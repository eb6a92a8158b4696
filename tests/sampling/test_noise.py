"""Noise belongs to positions: drawn in the order of `generate`, and available again whenever it is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

import lookfar.sampling.noise
from lookfar.errors import RequestError
from lookfar.sampling.noise import RandomStream, SamplingNoise
from lookfar.sampling.sampler import Sampler, SamplingParams, choose_rows, pick

CPU = torch.device("cpu")


def drawn_by_multinomial(seed: int, probabilities: torch.Tensor) -> list[int]:
    torch.manual_seed(seed)
    return [int(torch.multinomial(p[None], 1)) for p in probabilities]


@pytest.mark.parametrize("seed", range(20))
def test_a_pick_is_what_multinomial_draws(seed: int) -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(seed)) * 4
    expected = drawn_by_multinomial(seed, logits.softmax(-1))
    torch.manual_seed(seed)
    random = RandomStream(SamplingNoise(1, CPU), 0)
    assert [int(pick(row[None], random.at(i, 3000))[0]) for i, row in enumerate(logits)] == expected
    random.noise.finish(5)
    for processors in (LogitsProcessorList(), None):
        random = RandomStream(SamplingNoise(1, CPU, torch.Generator().manual_seed(seed)), 0)
        sampler = Sampler(SamplingParams(processors, random), [1])
        noise = sampler.noise_of(np.arange(1, 5), 3000)
        assert choose_rows(processors, logits, noise).tolist() == expected
        reverse, noise = logits[[0, 4, 3, 2, 1]], sampler.noise_of(np.arange(4, 0, -1), 3000)
        assert choose_rows(processors, reverse, noise).tolist() == [expected[0], *expected[:0:-1]]


def test_noise_that_was_dropped_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookfar.sampling.noise, "KEPT_BYTES", 3 * 2 * 50 * 4)  # three places of two sequences
    noise = SamplingNoise(2, CPU, torch.Generator().manual_seed(1))
    noise.at(0, 0, 50)
    first = [noise.at(place, 1, 50).clone() for place in range(10)]
    assert len(noise._kept) == 3
    for place in (0, 9, 4, 4, 1, 8):
        assert torch.equal(noise.at(place, 1, 50), first[place])
    torch.manual_seed(1)
    for place in range(10):
        assert torch.equal(torch.empty(2, 50).exponential_()[1], first[place])


def test_requests_at_different_positions_share_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large call a few requests run at a time, each at a position of its own."""
    batch, slots, length, width = 40, 8, 30, 16
    monkeypatch.setattr(lookfar.sampling.noise, "KEPT_BYTES", slots * length * width * 4)
    noise = SamplingNoise(batch, CPU, torch.Generator().manual_seed(1))
    drawn: list[int] = []
    draw = noise.draw
    monkeypatch.setattr(noise, "draw", lambda position: drawn.append(position) or draw(position))
    torch.manual_seed(1)
    expected = [torch.empty(batch, width).exponential_() for _ in range(length)]
    waiting, running = list(range(batch)), dict[int, int]()
    steps = 0
    while waiting or running:
        if waiting and len(running) < slots and steps % 4 == 0:  # they begin one after another
            running[waiting.pop(0)] = 0
        for row, position in list(running.items()):
            assert torch.equal(noise.at(position, row, width), expected[position][row])
            running[row] += 1
            noise.advance(row, position + 1)
            if position + 1 == length:
                noise.release(row)
                del running[row]
        steps += 1
    assert len(drawn) < batch * length / 3  # instead of one for each request and step
    assert sum(kept.noise.nbytes for kept in noise._kept.values()) <= slots * length * width * 4


def test_what_all_have_passed_is_forgotten() -> None:
    noise = SamplingNoise(2, CPU)
    for place in range(6):
        noise.at(place, 0, 20)
    noise.advance(0, 5)
    assert sorted(noise._kept) == list(range(6))
    noise.advance(1, 3)
    assert sorted(noise._kept) == [3, 4, 5]


def test_nothing_is_kept_for_requests_that_have_ended() -> None:
    noise = SamplingNoise(2, torch.device("cpu"))
    noise.at(0, 0, 50)
    noise.release(1)
    for position in range(1, 20):
        noise.at(position, 0, 50)
        noise.advance(0, position)
    assert list(noise._kept) == [19]
    noise.release(0)
    noise.fetch(0)  # of a request that has ended: nothing to copy
    assert not noise._kept


def test_the_generator_is_left_where_generate_leaves_it() -> None:
    probabilities = torch.rand(4, 100)
    drawn_by_multinomial(3, probabilities)
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    noise = SamplingNoise(1, CPU)
    noise.at(9, 0, 100)  # looked further than needed
    assert torch.equal(torch.get_rng_state(), noise._states[0])  # not changed meanwhile
    noise.finish(4)
    assert torch.equal(torch.get_rng_state(), expected)
    generator = torch.Generator().manual_seed(3)
    noise = SamplingNoise(1, CPU, generator)
    noise.at(0, 0, 100)
    noise.finish(4)  # further than was drawn
    assert torch.equal(generator.get_state(), expected)


def test_the_coming_noise_is_at_hand() -> None:
    noise = SamplingNoise(2, CPU)
    noise.at(0, 0, 30)
    noise.fetch(1)
    assert noise.look_ahead == lookfar.sampling.noise.LOOK_AHEAD

    def known(place: int) -> bool:
        return bool((noise.upcoming[1, place % noise.upcoming.shape[1]] == noise.at(place, 1, 30).numpy()).all())

    for head in (0, 3, 4, 20):
        noise.advance(1, head)
        noise.fetch(1)
        assert all(known(place) for place in range(head, head + noise.look_ahead))
        if head != 3:  # what a GPU does while it works: as much again, and nothing that is needed now is lost
            noise._copy(1, head + 2 * noise.look_ahead, wait=False)
            assert all(known(place) for place in range(head, head + 2 * noise.look_ahead))


def test_scores_without_a_number_are_one_sentence() -> None:
    with pytest.raises(RequestError, match="forbids every token"):
        pick(torch.full((1, 9), -torch.inf), torch.ones(9))

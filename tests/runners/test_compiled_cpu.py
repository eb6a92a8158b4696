"""Compiled CPU steps: the logits of the model's own code, and rows whose bits do not depend on the rows beside them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import lookfar
from families import DEVICE, tiny_model
from helpers import random_prompts, reference
from lookfar.core.plan import RequestPlan, StepPlan
from lookfar.core.tree import DraftTree
from lookfar.kernels.cpu.tiles import FLOAT32
from lookfar.models import packed_matrix
from lookfar.models.binding import BoundModel
from lookfar.models.compiled_families import why_not_compiled
from lookfar.models.self_check import taken_slots
from lookfar.runners import compiled_cpu, create_runner
from lookfar.runners.compiled_cpu import CompiledSteps
from lookfar.speculation.cost_curve import CostCurve

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="about steps on a CPU")

# Plain, with a window, with biases and both kinds of layers, with norms of queries and keys and both kinds of layers.
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS = random_prompts(24, 33, 5, 17)
NEW = 20


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def steps_of(model: PreTrainedModel) -> CompiledSteps:
    bound = BoundModel(model, pack=True)
    assert bound.decoder is not None
    return CompiledSteps(bound, bound.decoder)


def mixed_plan() -> StepPlan:
    """A prompt, a tree behind a long text, a branch behind a short one."""
    tree = DraftTree.from_paths([[5, 6, 7], [5, 8], [9, 9, 9, 9]])
    return StepPlan(
        [
            RequestPlan(np.array(PROMPTS[0]), 0, kv=0, predict=len(PROMPTS[0])),
            RequestPlan(np.array([11, 12]), 0, kv=1, predict=2, tree=tree),
            RequestPlan(np.array([13]), 0, kv=2, tree=DraftTree.from_paths([[1, 2]])),
        ]
    )


def expected_logits(model: PreTrainedModel, plan: StepPlan) -> torch.Tensor:
    bound = BoundModel(model, pack=False)
    padded = bound.forward(plan, taken_slots(plan.batch, 64))
    return torch.cat([logits[:count] for logits, count in zip(padded, plan.lengths, strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_the_models_own_code(family: str) -> None:
    model = tiny_model(family, torch.float32)
    found = steps_of(model).launch(mixed_plan(), taken_slots(3, 64)).all_logits
    assert torch.allclose(found, expected_logits(model, mixed_plan()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_other_layers_are_left_to_torch(changes: dict[str, Any]) -> None:
    assert why_not_compiled(tiny_model("llama", torch.float32, **changes))


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "vocab"), [(4, 4, 16, 96), (6, 1, 32, 101), (2, 2, 64, 97)])
def test_sizes(heads: int, kv_heads: int, dim: int, vocab: int) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": vocab}
    sizes["hidden_size"] = 48
    model = tiny_model("llama", torch.float32, **sizes)
    found = steps_of(model).launch(mixed_plan(), taken_slots(3, 64)).all_logits
    assert found.shape[1] == vocab
    assert torch.allclose(found, expected_logits(model, mixed_plan()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(family: str) -> None:
    steps = steps_of(tiny_model(family, torch.float32))
    together = steps.launch(mixed_plan(), taken_slots(3, 64)).all_logits
    starts = np.cumsum([0, *mixed_plan().lengths])
    for request, rows in enumerate(mixed_plan().requests):
        alone = steps.launch(StepPlan([rows]), taken_slots(3, 64)).all_logits
        assert torch.equal(alone, together[starts[request] : starts[request + 1]])
    # A path of the tree, token by token.
    cache, text = taken_slots(1, 64), [11, 12, 9, 9, 9, 9]
    path = [starts[1], starts[1] + 1, *(starts[1] + 2 + node for node in (4, 5, 6, 7))]
    for cached, (token, row) in enumerate(zip(text, path, strict=True)):
        one = steps.launch(StepPlan([RequestPlan(np.array([token]), cached)]), cache).all_logits
        cache.commit(0, 1)
        assert torch.equal(one[0], together[row])


def test_the_cost_curve_knows_the_rows_that_are_computed() -> None:
    model = tiny_model("llama", torch.float32)
    runner = create_runner(BoundModel(model, pack=True))
    table = CostCurve({rows: float(rows) for rows in range(1, 65)}, runner.limits).table(40)
    for rows in range(1, 41):
        plan = StepPlan([RequestPlan(np.arange(rows), 0)])
        assert runner.launch(plan, taken_slots(1, 64)).result().num_rows == table[rows]


def test_any_number_of_threads_gives_the_same_bits(threads: None) -> None:
    steps = steps_of(tiny_model("llama", torch.float32))
    found = []
    for count in (1, 2, 5, 1):
        torch.set_num_threads(count)
        found.append(steps.launch(mixed_plan(), taken_slots(3, 64)).all_logits)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7, "seed": 3}, {"strategy": "lookahead"}])
def test_texts_are_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    model = tiny_model(family, torch.float32)
    lm = lookfar.LM(model, pack=True)
    assert lm.engine.runner.name == "compiled"
    found = [done.token_ids for done in lm.generate(PROMPTS, max_new_tokens=NEW, **options)]
    if "do_sample" in options:
        plain = lookfar.LM(copy.deepcopy(model), pack=False)
        expected = [done.token_ids for done in plain.generate(PROMPTS, max_new_tokens=NEW, strategy="none", **options)]
    else:
        expected = [reference(model, prompt, NEW) for prompt in PROMPTS]
    assert found == expected
    assert lm.engine.runner.name == "compiled"


def flip(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return -output


flip.row_wise = True  # type: ignore[attr-defined]


def edits(model: Any) -> dict[str, Any]:
    """Changes of a model after which it decodes other texts."""
    layers = model.model.layers

    def scale(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.mul_(-1.5)

    def replace_attention() -> None:
        layers[1].self_attn.o_proj = nn.Linear(*reversed(layers[1].self_attn.o_proj.weight.shape), bias=False)

    def patch() -> None:
        forward = layers[0].mlp.forward
        layers[0].mlp.forward = lambda x: -forward(x)

    return {
        "a hook": lambda: layers[0].register_forward_hook(flip),
        "a hook of a part": lambda: layers[1].mlp.register_forward_hook(flip),
        "a weight": lambda: scale(layers[0].mlp.up_proj.weight),
        "a norm": lambda: scale(layers[0].input_layernorm.weight),
        "another norm tensor": lambda: setattr(model.model.norm.weight, "data", -model.model.norm.weight.data),
        "the embeddings": lambda: scale(model.model.embed_tokens.weight),
        "a row through .data": lambda: layers[0].mlp.up_proj.weight.data[:1].mul_(-9),
        "another module": replace_attention,
        "a method": patch,
        "fewer layers": lambda: (layers.__delitem__(1), setattr(model.config, "num_hidden_layers", 1)),
    }


@pytest.mark.parametrize("name", list(edits(tiny_model("llama", torch.float32))))
def test_changes_of_the_model_are_followed(name: str) -> None:
    model = tiny_model("llama", torch.float32)
    lm = lookfar.LM(model, pack=True)
    before = lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids
    assert before == reference(model, PROMPTS[0], NEW)
    edits(model)[name]()
    expected = reference(model, PROMPTS[0], NEW)
    assert expected != before
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == expected


def quantise(model: PreTrainedModel, kind: str) -> None:
    """Let the numbers of a model be those of a checkpoint with fewer bits."""
    with torch.no_grad():
        for weight in model.parameters():
            few = (64 * weight).round().clamp(-100, 100) / 64
            weight.copy_({"bfloat16": weight.bfloat16(), "float16": weight.half()}.get(kind, few))


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "uint8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_smaller_formats_give_the_bits_of_float32(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family, torch.float32)
    quantise(model, kind)
    steps = steps_of(model)
    found = steps.launch(mixed_plan(), taken_slots(3, 64)).all_logits
    assert kind in steps.packed.formats  # some matrices have no whole groups
    assert "float32" not in steps.packed.formats
    monkeypatch.setattr("lookfar.models.packed_matrix.format_of", lambda *_: FLOAT32)
    wide = steps_of(model)
    assert torch.equal(found, wide.launch(mixed_plan(), taken_slots(3, 64)).all_logits)
    assert set(wide.packed.formats) == {"float32"}
    assert steps.packed.nbytes < wide.packed.nbytes


@pytest.mark.parametrize("kind", ["bfloat16", "uint8"])
def test_weights_that_change_get_another_format(kind: str) -> None:
    model: Any = tiny_model("llama", torch.float32)
    quantise(model, kind)
    lm = lookfar.LM(model, pack=True)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[0], NEW)
    decoder = lm.engine.runner.model.decoder
    assert decoder is not None
    first = model.model.layers[0]
    for edit in (
        lambda: first.self_attn.k_proj.weight.data.mul_(-1.37),  # its matrix also holds queries and values
        lambda: first.mlp.down_proj.weight.data[3:4].add_(0.123),
        lambda: model.lm_head.weight.data.mul_(1.01),
        lambda: first.mlp.down_proj.weight.data.fill_(0.5),
        lambda: [weight.data.mul_(1.1) for weight in model.parameters()],
    ):
        edit()
        assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[0], NEW)
        assert lm.engine.runner.name == "compiled"
        assert "float32" in decoder.formats
    assert set(decoder.formats) == {"float32"}


def test_a_format_that_finds_no_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama", torch.float32)
    quantise(model, "bfloat16")
    lm = lookfar.LM(model, pack=True)
    lm.generate(PROMPTS[0], max_new_tokens=NEW)
    model.model.layers[0].self_attn.o_proj.weight.data.mul_(1.01)

    def full(count: int) -> Any:
        raise MemoryError

    monkeypatch.setattr("lookfar.models.packed_matrix.aligned", full)
    with pytest.raises(MemoryError):
        lm.generate(PROMPTS[0], max_new_tokens=NEW)
    monkeypatch.undo()
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[0], NEW)
    assert lm.engine.runner.name == "compiled"


def test_a_change_while_weights_are_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama", torch.float32)
    head, write = model.lm_head.weight, packed_matrix.write_panels

    def interrupted(weight: torch.Tensor, *others: Any) -> bool:
        done = write(weight, *others)
        if weight is head:
            monkeypatch.undo()
            head.data.mul_(-1.0)  # by another thread, say
        return done

    monkeypatch.setattr(packed_matrix, "write_panels", interrupted)
    lm = lookfar.LM(model, pack=True)
    lm.generate(PROMPTS[0], max_new_tokens=1)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[0], NEW)


def test_layers_that_share_weights_are_left_to_torch() -> None:
    model: Any = tiny_model("llama", torch.float32)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert "share" in why_not_compiled(model)
    lm = lookfar.LM(model, pack=True)
    lm.warmup()
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[0], NEW)


def test_a_hook_comes_and_goes() -> None:
    model = tiny_model("llama", torch.float32)
    lm = lookfar.LM(model, pack=True)
    before = lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids
    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(1)

    count.row_wise = True  # type: ignore[attr-defined]
    handle = model.model.layers[0].register_forward_hook(count)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == before
    assert calls
    assert lm.engine.runner.name == "flat"
    handle.remove()
    calls.clear()
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == before
    assert not calls
    assert lm.engine.runner.name == "compiled"


def test_dropout_in_training_mode_is_left_to_torch() -> None:
    model = tiny_model("llama", torch.float32, attention_dropout=0.5)
    assert not why_not_compiled(model)
    model.train()
    assert why_not_compiled(model)


def test_a_weight_that_changes_between_two_steps() -> None:
    model = tiny_model("llama", torch.float32)
    lm = lookfar.LM(model, pack=True)
    stream = lm.stream(PROMPTS[0], max_new_tokens=200, strategy="none")  # which goes on for a while after the change
    next(iter(stream))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[7] = 1.0
    rest = [token for chunk in stream for token in chunk.token_ids]
    assert set(rest[-5:]) <= {0, 7}  # all logits but one are zero


def test_other_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_cpu, "agree", lambda *_: False)
    model = tiny_model("llama", torch.float32)
    lm = lookfar.LM(model, pack=True)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW).token_ids == reference(model, PROMPTS[0], NEW)
    assert lm.engine.runner.name == "flat"


def test_without_a_copy_of_the_weights_torch_runs_the_layers() -> None:
    runner = create_runner(BoundModel(tiny_model("llama", torch.float32), pack=False))
    assert runner.name == "flat"


def test_two_models_in_two_threads() -> None:
    models = [tiny_model(family, torch.float32) for family in ("llama", "qwen3")]
    expected = [reference(model, PROMPTS[1], NEW) for model in models]
    lms = [lookfar.LM(model, pack=True) for model in models]
    found: dict[tuple[int, int], list[int]] = {}

    def decode(index: int) -> None:
        for turn in range(4):
            found[index, turn] = lms[index].generate(PROMPTS[1], max_new_tokens=NEW).token_ids

    workers = [threading.Thread(target=decode, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {(index, turn): expected[index] for index in range(2) for turn in range(4)}

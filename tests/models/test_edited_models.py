"""Random edits of a model between random calls: every answer is that of a copy decoded by transformers.

The edits are always the same ones; `FUZZ_MODELS=150` tries as many other sequences of them.
"""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

try:
    import peft
except ImportError:
    peft = None

import lookfar
from families import DEVICE, tiny_model
from lookfar import LM
from lookfar.errors import LookfarWarning

EXACT = (torch.float32, torch.float64)  # in half precision, rows of a larger step may differ in the last bit
SEEDS = st.integers(0, 1000)
SIZES = st.integers(80, 130)  # of the vocabulary; it starts at 96


def tokens(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(1, 80, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class CallsGenerate(LogitsProcessor):
    """Calls the model that it is used with, and lets its answer count."""

    row_wise = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 3 == 0:
            inner = self.model.generate(input_ids[:, -4:], max_new_tokens=2, do_sample=False)
            scores = scores.clone()
            scores[:, inner[0, -1]] += 2.0
        return scores


class EditedModel(RuleBasedStateMachine):
    """An accelerated model, an LM of the same model, and everything that users do to models."""

    def noise(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor)

    def linears(self) -> list[nn.Linear]:
        return [m for m in self.model.modules() if type(m) is nn.Linear and not parametrize.is_parametrized(m)]

    def plain_weights(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.dim() > 1]

    @initialize(family=st.sampled_from(["llama", "gpt2", "gemma2"]), seed=SEEDS)
    def start(self, family: str, seed: int) -> None:
        warnings.simplefilter("ignore")
        self.model = lookfar.accelerate(tiny_model(family, torch.float32), budget=8)
        self.model.generation_config.pad_token_id = 0
        self.lm = LM(self.model, budget=8)
        self.hook: Any = None
        self.parametrised = False
        self.adapter: Any = None

    # Calls

    def compare(self, call: Callable[[PreTrainedModel], torch.Tensor], seed: int) -> None:
        plain = lookfar.restore(copy.deepcopy(self.model))
        results = []
        for model in (plain, self.model):
            torch.manual_seed(seed)
            results.append(call(model))
        if self.model.dtype in EXACT:
            assert torch.equal(*results)
        else:
            assert len(results[0]) == len(results[1])

    @rule(seed=SEEDS, batch=st.integers(1, 3), new=st.integers(1, 10), do_sample=st.booleans(), inference=st.booleans())
    def generate(self, seed: int, batch: int, new: int, do_sample: bool, inference: bool) -> None:
        ids = tokens((batch, 9), seed)
        mask = torch.ones_like(ids)
        # transformers' eager attention gives NaN for padding in float64
        padded = self.model.dtype != torch.float64 or self.model.config._attn_implementation != "eager"
        for row in range(1, batch) if padded else ():
            ids[row, : 2 * row], mask[row, : 2 * row] = 0, 0
        mode = torch.inference_mode if inference else torch.no_grad

        def call(model: PreTrainedModel) -> torch.Tensor:
            with mode():
                return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=do_sample)

        self.compare(call, seed)

    @rule(seed=SEEDS, sampled=st.booleans())
    def generate_with_the_lm(self, seed: int, sampled: bool) -> None:
        prompt = tokens((7,), seed).tolist()

        def call(model: PreTrainedModel) -> torch.Tensor:
            if model is self.model:
                options: Any = {"temperature": 0.9, "top_k": 0} if sampled else {}
                done = self.lm.generate(prompt, max_new_tokens=6, **options)
                return torch.tensor([prompt + done.token_ids], device=DEVICE)
            ids, options = torch.tensor([prompt], device=DEVICE), {"temperature": 0.9, "top_k": 0} if sampled else {}
            return model.generate(ids, max_new_tokens=6, do_sample=sampled, **options)

        self.compare(call, seed)

    @rule(seed=SEEDS)
    def generate_inside_of_generate(self, seed: int) -> None:
        ids = tokens((1, 7), seed)
        self.compare(
            lambda m: m.generate(ids, max_new_tokens=6, logits_processor=LogitsProcessorList([CallsGenerate(m)])), seed
        )

    @precondition(lambda self: self.model.dtype == torch.float32)
    @rule(seed=SEEDS)
    def generate_under_autocast(self, seed: int) -> None:
        ids = tokens((1, 7), seed)
        with torch.autocast(DEVICE, torch.bfloat16):
            self.compare(lambda m: m.generate(ids, max_new_tokens=5), seed)

    # Weights

    @rule(seed=SEEDS, how=st.sampled_from(["add_", "copy_", "clone", "mul_", "state", "step", "view", "swap"]))
    def change_weights(self, seed: int, how: str) -> None:
        weights = self.plain_weights()
        weight = weights[seed % len(weights)]
        with torch.no_grad():
            if how == "add_":
                weight.data.add_(self.noise(weight, seed))
            elif how == "copy_":
                weight.copy_(self.noise(weight, seed))
            elif how == "clone":
                for other in weights:
                    other.data = (other.data + self.noise(other, seed)).clone()
            elif how == "mul_":
                weight.data.mul_(-1.5)
            elif how == "state":
                state = {name: value + self.noise(value, seed) for name, value in self.model.state_dict().items()}
                self.model.load_state_dict(state, assign=bool(seed % 2))
            elif how == "view":
                weight.data.view(-1)[: weight.shape[-1]] = 1.5  # the first row
            elif how == "swap":
                same = next(w for w in weights if w.shape == weight.shape)
                same.data, weight.data = weight.data, same.data
        if how == "step":
            for parameter in self.model.parameters():
                parameter.grad = self.noise(parameter, seed)
            torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=bool(seed % 2)).step()
            self.model.zero_grad()

    @rule(seed=SEEDS)
    def change_one_value(self, seed: int) -> None:
        weight = self.plain_weights()[seed % 3]
        weight.data.view(-1)[seed % weight.numel()] = 3.0
        lookfar.refresh(self.model)
        self.lm.refresh()

    @rule(dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]), back=st.booleans())
    def change_precision(self, dtype: torch.dtype, back: bool) -> None:
        self.model.to(dtype)
        if back or self.model.dtype == torch.bfloat16:
            self.model.float()

    @rule()
    def go_to_half_precision_and_decode(self) -> None:
        self.model.bfloat16()
        self.generate(1, 2, 5, False, False)
        self.model.double()

    @rule(size=SIZES)
    def resize_vocabulary(self, size: int) -> None:
        self.model.resize_token_embeddings(size, mean_resizing=False)

    # Layers

    @rule(seed=SEEDS)
    def prune_a_layer(self, seed: int) -> None:
        layers = [layer for layer in self.linears() if not prune.is_pruned(layer)]
        if layers:
            layer = layers[seed % len(layers)]
            with torch.no_grad():  # so that the model can still be copied
                prune.random_unstructured(layer, "weight", amount=0.4)
            if seed % 2:
                prune.remove(layer, "weight")

    @rule(seed=SEEDS)
    def parametrise_a_layer(self, seed: int) -> None:
        layers = [layer for layer in self.linears() if not prune.is_pruned(layer)]
        head = self.model.get_output_embeddings()
        if layers := [layer for layer in layers if layer is not head]:
            layer = layers[seed % len(layers)]
            parametrizations.weight_norm(layer)
            self.parametrised = True
            if seed % 2:
                parametrize.remove_parametrizations(layer, "weight")

    @precondition(lambda self: peft is not None and self.adapter is None and self.model.config.model_type == "llama")
    @rule(seed=SEEDS)
    def add_adapter(self, seed: int) -> None:
        torch.manual_seed(seed)
        chosen = [name for name, module in self.model.named_modules() if module in self.linears()]
        chosen = [name for name in chosen if name.endswith(("q_proj", "down_proj"))]
        if chosen:
            config = peft.LoraConfig(r=2, target_modules=chosen, init_lora_weights=False)
            self.adapter = peft.get_peft_model(self.model, config)

    @precondition(lambda self: self.adapter is not None)
    @rule(what=st.sampled_from(["merge", "unmerge", "unload", "merge and unload"]))
    def change_adapter(self, what: str) -> None:
        if what == "merge":
            self.adapter.merge_adapter()
        elif what == "unmerge":
            self.adapter.unmerge_adapter()
        else:
            done = self.adapter.merge_and_unload() if "merge" in what else self.adapter.unload()
            assert done is self.model
            self.adapter = None

    @precondition(lambda self: self.hook is None)
    @rule()
    def add_hook(self) -> None:
        layer = next(m for m in self.model.modules() if isinstance(m, nn.ModuleList))[0]

        def steer(module: nn.Module, inputs: Any, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            states = torch.cat([states[:, :-1], states[:, -1:] + 0.5], 1)
            return (states, *output[1:]) if isinstance(output, tuple) else states

        self.hook = layer.register_forward_hook(steer)

    @precondition(lambda self: self.hook is not None)
    @rule()
    def remove_hook(self) -> None:
        self.hook.remove()
        self.hook = None

    # The model as a whole

    @rule(attention=st.sampled_from(["eager", "sdpa"]))
    def change_attention(self, attention: str) -> None:
        if attention == "eager" or self.model._supports_sdpa:
            self.model.set_attn_implementation(attention)

    @precondition(lambda self: self.adapter is None and self.hook is None)
    @rule(how=st.sampled_from(["copy", "pickle", "again"]))
    def replace_model(self, how: str) -> None:
        if how == "pickle" and self.parametrised:
            how = "copy"  # torch refuses to pickle such modules
        if how != "again":
            with torch.no_grad():
                model = copy.deepcopy(self.model) if how == "copy" else pickle.loads(pickle.dumps(self.model))
            self.model = model
            self.lm = LM(self.model, budget=8)
        lookfar.accelerate(lookfar.restore(self.model), budget=8)

    @rule()
    def train_and_stop(self) -> None:
        self.model.train()
        self.model.eval()

    def teardown(self) -> None:
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", LookfarWarning)


TestEditedModels = pytest.mark.slow(EditedModel.TestCase)
TestEditedModels.settings = settings(
    max_examples=int(os.environ.get("FUZZ_MODELS", "12")),
    derandomize="FUZZ_MODELS" not in os.environ,
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.generate,),
)

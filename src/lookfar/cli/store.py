"""`lookfar store`: files of past texts to draft from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lookfar.cli import options
from lookfar.core.progress import progress_bar
from lookfar.errors import StoreError

app = typer.Typer(no_args_is_help=True, help="Files of past texts to draft from.")

Out = Annotated[Path, typer.Argument(help="The store's file.")]
Texts = Annotated[list[Path], typer.Argument(help="Text files, or jsonl files with a text in each line.")]
Field = Annotated[str, typer.Option(help="The field of a jsonl line that holds the text.")]
Stores = Annotated[list[Path], typer.Argument(help="The stores to merge, made with one tokenizer.")]


@app.command()
def build(out: Out, texts: Texts, model: options.Model = "demo", field: Field = "reference") -> None:
    """Build OUT from texts such as earlier answers, with MODEL's tokenizer; its weights are not loaded."""
    from lookfar.models.pretrained import load_tokenizer
    from lookfar.retrieval.draft_store import DraftStore

    tokenizer, vocab_size = load_tokenizer(model)
    store = DraftStore(vocab_size, tokenizer)
    read = [text for path in texts for text in _read(path, field)]
    with progress_bar("Learning", len(read)) as advance:
        for text in read:
            store.learn(text)
            advance(1)
    store.save(out)
    options.say("Written", f"{out}, {store.tokens} tokens of {len(read)} texts", "green")


@app.command()
def info(path: Out, as_json: options.Json = False) -> None:
    """Show what a store holds, and check the file."""
    from lookfar.retrieval.store_file import read_store_file
    from lookfar.retrieval.suffix_index import END

    header, contents = read_store_file(path)
    facts: dict[str, Any] = {
        "format": header.version,
        "tokens": int((contents.text != END).sum()),
        "texts": int((contents.text == END).sum()),
        "branches": len(contents.tokens),
        "predictions": sum(len(array) for name, array in contents.beside.items() if name.endswith(".keys")),
        "vocabulary": header.vocab_size,
        "tokenizer": header.tokenizer[:16] or "unknown",
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
    """Merge several stores into OUT."""
    from lookfar.retrieval.draft_store import DraftStore
    from lookfar.retrieval.store_file import VERSION, read_store_file, write_store_file

    read = [read_store_file(path) for path in stores]
    first = read[0][0]
    merged, beside = DraftStore(first.vocab_size), read[0][1].beside
    for path, (header, contents) in zip(stores, read, strict=True):
        if header.made_for != first.made_for:
            raise StoreError(f"{path} and {stores[0]} were made with different tokenizers: merge stores of one model.")
        merged.merge(contents, header.learned)
        beside = contents.beside or beside  # of the last store that has any
    header = first._replace(version=VERSION, learned=merged.provenance.dumps())
    write_store_file(out, header, merged.contents()._replace(beside=beside))
    options.say("Written", f"{out}, {merged.tokens} tokens of {len(stores)} stores", "green")


def _read(path: Path, field: str) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise StoreError(f"{path} is not UTF-8 text: give text or jsonl files.") from None
    if path.suffix != ".jsonl":
        return [text]
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)[field]
        except ValueError:
            raise StoreError(f"{path}, line {number}, is not JSON: fix it or give a text file.") from None
        except (KeyError, TypeError):
            raise StoreError(f"{path}, line {number}, has no {field!r}: name the field with --field.") from None
        found.append(value if isinstance(value, str) else json.dumps(value))
    return found

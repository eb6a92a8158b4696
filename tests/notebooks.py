"""Run the code cells of a notebook without Jupyter, and keep what they print in it.

python tests/notebooks.py examples/tour.ipynb
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> list[str]:
    """Run the code cells in order in one namespace; return what each of them printed."""
    session: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(code_cells(json.loads(path.read_text())), 1):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), session)
        printed.append(out.getvalue())
    return printed


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        notebook = json.loads(path.read_text())
        for number, (cell, text) in enumerate(zip(code_cells(notebook), run(path), strict=True), 1):
            cell["execution_count"] = number
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}
            cell["outputs"] = [stream] if text else []
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

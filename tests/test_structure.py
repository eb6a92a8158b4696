"""The structure of the package: layers that import downwards only, no cycles, short functions and modules.

Imports are read from the source, so lazy ones and those under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lookfar

ROOT = Path(lookfar.__file__).parent
# From the bottom up. A package imports from lower layers and from itself, never from its own layer or a higher one.
LAYERS = (
    ("errors", "version", "core"),
    ("retrieval", "sampling", "kvcache", "kernels", "pages", "prompts", "detokenizer", "ranks"),
    ("models",),
    ("drafters", "runners"),
    ("speculation",),
    ("engine",),
    ("streams", "profiles", "options", "sharing", "inputs"),
    ("lm",),
    ("loading", "rehearsal"),
    ("integrations", "explain", "bench", "testing", "parallel"),
    ("compat", "server"),
    ("cli",),
    ("__init__",),
    ("__main__",),
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
MAX_FUNCTION, MAX_MODULE, MAX_PARAMETERS = 60, 350, 6
# What callers pass by keyword: the options of a user, or the interface of another library.
MANY_PARAMETERS = {
    "bench/__init__.py": {"run"},
    "compat/lade.py": {"config_lade"},
    "integrations/transformers/loop.py": {"generate"},
    "lm.py": {"__init__", "requests"},
    "loading.py": {"load"},
}
PATHS = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(ROOT.rglob("*.py"))}
MODULES = {name.removesuffix(".__init__"): path for name, path in PATHS.items()}
SOURCES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(module: str) -> Iterator[str]:
    """Yield the modules of lookfar that a module imports anywhere in its source."""
    for node in ast.walk(SOURCES[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{module} imports relatively"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("lookfar.") in MODULES else node.module for name in inner]
        else:
            continue
        for name in names:
            if name == "lookfar" or name.startswith("lookfar."):
                yield name.removeprefix("lookfar.") if name != "lookfar" else "__init__"


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(SOURCES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def package_of(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_lower_layers_only(module: str) -> None:
    own = package_of(module)
    assert own in LAYER_OF, f"{own} has no layer yet"
    for other in imports(module):
        package = package_of(other)
        assert package == own or LAYER_OF[package] < LAYER_OF[own], f"{module} imports {other}"


def test_no_module_imports_itself_through_others() -> None:
    try:
        TopologicalSorter({module: set(imports(module)) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_the_check_sees_lazy_and_typing_imports() -> None:
    found = set(imports("cli.bench"))
    assert {"bench.curve", "bench.page", "bench.summary", "lm"} <= found  # the first two are lazy, the others for types


@pytest.mark.parametrize("module", [module for module in MODULES if package_of(module) != "kernels"])
def test_functions_are_short_and_take_few_parameters(module: str) -> None:
    path = str(MODULES[module].relative_to(ROOT))
    for function in functions(module):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= MAX_FUNCTION, f"{function.name} has {length} lines"
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        if package_of(module) != "cli" and function.name not in MANY_PARAMETERS.get(path, ()):
            assert count <= MAX_PARAMETERS, f"{function.name} takes {count} parameters"


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_MODULE

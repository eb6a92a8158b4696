"""docs/models.md: every family of the installed transformers that generates text, how its drafts are verified, and the
test that shows it.

    python tests/model_table.py > docs/models.md
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import transformers
from transformers import CONFIG_MAPPING

from families import CHAINS, FALLBACK, RECURRENT, TREES
from lookfar.models.support import Mode, examine, loaded_class
from media import MEDIA
from sources import CHAIN_FAMILIES, FALLBACK as OTHER_SOURCES, TREE_FAMILIES

HEAD = """# Models

How the draft tokens of a model are verified, by family, with transformers {version}. This page is written by
`python tests/model_table.py > docs/models.md` from the default config of every family that transformers can generate
text with. `lookfar check MODEL` says the same of a checkpoint, whose config may differ: a window, a rotary scaling,
a quantisation.

- **tree**: drafts of all sources are verified as one tree.
- **chain**: drafts are verified as one path. Recurrent states are put back after a rejected draft, and the accepted
  tokens are fed again in front of the next drafts.
- **none**: transformers decodes, with one warning that names the reason.

*Shown by* names the test that compares a tiny random model of the family with its own `generate`, greedy and sampled,
alone and in batches. Families without one are judged by their config and code; model code outside of transformers is
checked when it is loaded.

{counts}
"""
KINDS = {"text": "Text", "media": "Images, audio or video in the prompt", "source": "Encoder–decoder"}


@dataclass(frozen=True)
class Family:
    """One line of a table."""

    name: str
    kind: str
    mode: Mode
    reason: str
    test: str  # empty for none


def families() -> Iterator[Family]:
    """Examine the default config of every family that generates text."""
    tests = _tests()
    for name in sorted(CONFIG_MAPPING):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = CONFIG_MAPPING[name]()
            _, model_class = loaded_class(config)
            support = examine(config, model_class)
        except Exception:  # no model that generates text, or no default config
            continue
        kind = "source" if support.encoder_decoder else "media" if support.takes_media else "text"
        yield Family(name, kind, support.mode, support.reason, tests.get(name, ""))


def _tests() -> dict[str, str]:
    """Return the test of each family."""
    found: dict[str, str] = {}
    for names, test in (
        ((*TREES, *FALLBACK), "models/test_families.py"),
        ((*RECURRENT, *CHAINS), "models/test_chains.py"),
        (MEDIA, "models/test_media.py"),
        ((*TREE_FAMILIES, *CHAIN_FAMILIES, *OTHER_SOURCES), "models/test_sources.py"),
    ):
        for name in names:
            found.setdefault(name.partition(":")[0], test)
    return found


def table(of: list[Family]) -> str:
    """Return a Markdown table."""
    lines = ["| family | mode | why no tree | shown by |", "|---|---|---|---|"]
    lines += [f"| {f.name} | {f.mode} | {f.reason} | {f.test and f'`tests/{f.test}`'} |" for f in of]
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    found = list(families())
    counts = ["| | tree | chain | none | shown by a test |", "|---|---|---|---|---|"]
    sections = []
    for kind, title in KINDS.items():
        own = [family for family in found if family.kind == kind]
        modes = " | ".join(str(sum(family.mode == mode for family in own)) for mode in ("tree", "chain", "none"))
        counts.append(f"| {title} | {modes} | {sum(bool(family.test) for family in own)} of {len(own)} |")
        sections.append(f"## {title}\n\n{table(own)}\n")
    head = HEAD.format(version=transformers.__version__, counts="\n".join(counts))
    return head + "\n" + "\n".join(sections)


if __name__ == "__main__":
    print(page(), end="")

"""Hooks of the documentation site: pages from the root of the repository, and links that leave the docs folder."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
BLOB = "https://github.com/lookfar-project/lookfar/blob/main/"
TREE = BLOB.replace("/blob/", "/tree/")
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie in the root of the repository."""
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files of the repository to their page, or to GitHub where the site has none."""
    folder = "docs" if page.file.src_uri not in PAGES.values() or page.file.src_uri == "index.md" else ""
    here = posixpath.join(folder, posixpath.dirname(page.file.src_uri)) if folder else ""

    def lead(found: re.Match[str]) -> str:
        target, anchor = found[2], found[3] or ""
        if not target or (re.match(r"[a-z]+:", target) and not target.startswith(BLOB)):
            return found[0]
        path = (
            target.removeprefix(BLOB) if target.startswith(BLOB) else posixpath.normpath(posixpath.join(here, target))
        )
        if path in PAGES:
            return f"{found[1]}{_relative(PAGES[path], page)}{anchor}{found[4]}"
        if path.startswith("docs/"):
            return f"{found[1]}{_relative(path.removeprefix('docs/'), page)}{anchor}{found[4]}"
        if (ROOT / path).exists():
            return f"{found[1]}{TREE if (ROOT / path).is_dir() else BLOB}{path}{anchor}{found[4]}"
        return found[0]

    return LINK.sub(lead, markdown)


def _relative(target: str, page: Any) -> str:
    return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

"""GET /: the playground, as plain files."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, HTTPException, Response

from lookfar.pages import theme

TYPES = {
    "index.html": "text/html",
    "theme.css": "text/css",
    "style.css": "text/css",
    "page.js": "text/javascript",
    "stream.js": "text/javascript",
    "pane.js": "text/javascript",
    "tree.js": "text/javascript",
    "charts.js": "text/javascript",
}
# Scripts and styles come from this server only, and the page talks to nobody else.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page(app: FastAPI) -> None:
    folder = files("lookfar.server") / "page_files"
    contents = {name: theme() if name == "theme.css" else (folder / name).read_bytes() for name in TYPES}

    def served(name: str) -> Response:
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
        return Response(contents[name], media_type=f"{TYPES[name]}; charset=utf-8", headers=headers)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return served("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in TYPES:
            raise HTTPException(404, "There is no such file")
        return served(name)

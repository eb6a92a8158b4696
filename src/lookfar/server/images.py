"""Images in messages: data URLs only, checked before they are decoded. Nothing is fetched."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any

from lookfar.server.errors import invalid

DATA_URL = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,(.*)", re.DOTALL)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 1 << 24  # of one image


def image_of(url: str, param: str) -> Any:
    """Return the image in a data URL, in RGB."""
    match = DATA_URL.fullmatch(url)
    if match is None:
        raise invalid(param, "Images are given as data:image/png;base64,…: this server fetches nothing.")
    try:
        from PIL import Image
    except ImportError:
        raise invalid(param, "Images need Pillow on the server, which is not installed.") from None
    try:
        image = Image.open(io.BytesIO(base64.b64decode(match[1], validate=True)), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise invalid(param, f"An image has at most {MAX_PIXELS} pixels, not {width} × {height}.")
        return image.convert("RGB")
    except (binascii.Error, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise invalid(param, "The image cannot be read: send a PNG, JPEG, WebP or GIF file in base64.") from None

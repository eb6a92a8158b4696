"""API keys, and the tenants that they belong to."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from dataclasses import dataclass
from pathlib import Path

from lookfar.errors import ConfigError

ENVIRONMENT = "LOOKFAR_API_KEYS"  # keys separated by commas
HASHED = "sha256:"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tenant:
    """A client with a draft state of its own: its answers never speed up those of other tenants, and vice versa."""

    name: str
    namespace: str = ""  # tenants with the same one share their draft state and prefixes
    remember: bool = True  # whether its answers are kept to draft from
    priority: int = 0  # added to that of its requests; lower is earlier


ANYONE = Tenant("anyone")


class ApiKeys:
    """The keys that a server accepts. Without any, everyone is the same tenant."""

    def __init__(self, tenants: dict[bytes, Tenant] | None = None) -> None:
        self._tenants = list((tenants or {}).items())  # SHA-256 of the key → tenant

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    @property
    def tenants(self) -> list[Tenant]:
        return [tenant for _, tenant in self._tenants] or [ANYONE]

    def tenant(self, key: str | None) -> Tenant | None:
        """Return the tenant of a key; None if the key is not known. Takes the same time for all keys."""
        if not self.required:
            return ANYONE
        digest = _digest(key or "")
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if key else None


def load_keys(path: Path | None, environment: str | None = None) -> ApiKeys:
    """Read the keys of a file and of the environment variable LOOKFAR_API_KEYS.

    A line of the file is `NAME KEY`, then perhaps `namespace=NAME`, `remember=false` and `priority=NUMBER`; `#` starts
    a comment. A key may be given as `sha256:` and its digest. Keys of the environment share one namespace.
    """
    tenants: dict[bytes, Tenant] = {}
    text = os.environ.get(ENVIRONMENT, "") if environment is None else environment
    for key in filter(None, (part.strip() for part in text.split(","))):
        tenants[_digest(key)] = ANYONE
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read as text ({getattr(error, 'strerror', None) or error}): correct --keys."
            ) from error
        listed: dict[bytes, Tenant] = {}
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                digest, tenant = _parsed(line.split(), f"{path}, line {number}")
                if digest in listed:
                    raise ConfigError(f"{path}, line {number}: {listed[digest].name} has this key, too: use another.")
                listed[digest] = tenant
        tenants |= listed
        if not tenants:
            raise ConfigError(f"{path} holds no keys: write lines like `alice sk-…`.")
    return ApiKeys(tenants)


def _parsed(words: list[str], where: str) -> tuple[bytes, Tenant]:
    if len(words) < 2:
        raise ConfigError(f"{where}: write a name and a key, as in `alice sk-…`.")
    name, key, *options = words
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has up to 64 letters, digits, - and _, not {name!r}.")
    settings = {"namespace": name, "remember": "true", "priority": "0"}
    for option in options:
        field, equals, value = option.partition("=")
        if not equals or field not in settings:
            raise ConfigError(f"{where}: {option!r} is not namespace=NAME, remember=false or priority=NUMBER.")
        settings[field] = value
    if settings["remember"] not in ("true", "false") or not re.fullmatch(r"-?\d{1,3}", settings["priority"]):
        raise ConfigError(f"{where}: remember is true or false, and priority a whole number.")
    if not NAME.fullmatch(settings["namespace"]):
        raise ConfigError(f"{where}: a namespace has up to 64 letters, digits, - and _.")
    try:
        digest = bytes.fromhex(key.removeprefix(HASHED)) if key.startswith(HASHED) else _digest(key)
    except ValueError:
        digest = b""
    if not key.isascii():
        raise ConfigError(f"{where}: a key has letters, digits and signs of ASCII only, since it is sent in a header.")
    if len(digest) != 32:
        raise ConfigError(f"{where}: behind sha256: there are 64 hexadecimal digits.")
    tenant = Tenant(name, settings["namespace"], settings["remember"] == "true", int(settings["priority"]))
    return digest, tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

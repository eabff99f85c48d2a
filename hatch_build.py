"""Builds the small parts in C that make shared memory faster; where that fails, offbeat is installed without them."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

RUNTIME = Path("src/offbeat/runtime")
FLAGS = ("-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
EXTENSION = "backend/_quicker.abi3.so"
PARTS = {
    "collectives/one_sided/native.c": "collectives/one_sided/_native.so",
    "collectives/messages/channels.c": "collectives/messages/_channels.so",
    "backend/quick.c": EXTENSION,
}
"""What is compiled into what: libraries without headers of Python's, and an extension module of its stable ABI."""


class NativeLibrary(BuildHookInterface):
    """Compiles the parts, each beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before files are collected."""
        del version
        built = [library for source, library in PARTS.items() if self._build(source, library)]
        if built:
            python = "cp311-abi3" if EXTENSION in built else "py3-none"
            build_data["pure_python"] = False
            build_data["tag"] = f"{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def _build(self, source: str, target: str) -> bool:
        library = Path(self.root) / RUNTIME / target
        fresh = library.with_suffix(f".{os.getpid()}")
        compiler, headers = os.environ.get("CC", "cc").split(), f"-I{sysconfig.get_paths()['include']}"
        try:
            subprocess.run([*compiler, *FLAGS, headers, "-o", fresh, Path(self.root) / RUNTIME / source], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            fresh.unlink(missing_ok=True)
            library.unlink(missing_ok=True)
            self.app.display_warning(f"offbeat works without {target}, but more slowly: {error}")
            return False
        fresh.replace(library)
        return True

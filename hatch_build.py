"""Builds the small library in C that makes shared memory faster; where that fails, offbeat is installed without it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/offbeat/runtime/shared")
FLAGS = ("-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")


class NativeLibrary(BuildHookInterface):
    """Compiles native.c into _native.so, beside it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before files are collected."""
        del version
        library = Path(self.root) / FOLDER / "_native.so"
        fresh = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CC", "cc").split()
        try:
            subprocess.run([*compiler, *FLAGS, "-o", fresh, library.with_name("native.c")], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            fresh.unlink(missing_ok=True)
            self.app.display_warning(f"offbeat works without its compiled part, but more slowly: {error}")
            return
        fresh.replace(library)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

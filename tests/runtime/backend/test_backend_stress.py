"""The stress of benchmarks/, in small: it holds, and it sees what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import paths
import pytest
from backend_cases.running import BACKEND

from conftest import clean_environment

PROGRAM = paths.ROOT / "benchmarks" / "stress.py"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hogs", "native"), [(3, 0, "1"), (4, 2, "1"), (3, 0, "0")])
def test_random_calls_are_right_and_sums_the_same_everywhere(
    tmp_path: Path, ranks: int, hogs: int, native: str
) -> None:
    out = tmp_path / "stress.json"
    words = ["--calls", "250", "--seed", "7", "--ranks", str(ranks), "--hogs", str(hogs), "--backend", BACKEND]
    command = [sys.executable, str(PROGRAM), *words, "--out", str(out)]
    subprocess.run(command, check=True, timeout=120, env=clean_environment() | {"OFFBEAT_NATIVE": native})
    (found,) = json.loads(out.read_text())["results"].values()
    assert found["holds"]
    assert max(found["calls that each rank took part in"]) > 150

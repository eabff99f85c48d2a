"""What `import offbeat` does not import: libraries that take longer to import than most commands take."""

from __future__ import annotations

import subprocess
import sys

SLOW = ("scipy.stats", "scipy.optimize", "networkx")


def test_the_public_names_import_no_slow_library() -> None:
    code = f"""
import sys, offbeat
for name in offbeat.__all__:
    getattr(offbeat, name)
sys.exit(", ".join(name for name in {SLOW!r} if name in sys.modules) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

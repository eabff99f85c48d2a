"""Write docs/modules.md: every module with the first line of its own docstring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "offbeat"
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Modules

Every module of offbeat with the first line of its docstring; made by `python docs/modules.py`.
[architecture.md](architecture.md) explains how they fit together, [glossary.md](glossary.md) defines the terms.
"""


def first_line(module: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def page() -> str:
    """Return the page as Markdown: a table for each package."""
    parts = [HEAD]
    for folder in sorted({module.parent for module in SOURCE.rglob("*.py")}):
        modules = sorted(module for module in folder.glob("*.py") if module.stem not in ("__init__", "__main__"))
        name = "/".join(["offbeat", *folder.relative_to(SOURCE).parts])
        rows = [f"| [`{module.stem}`](../{module.relative_to(ROOT)}) | {first_line(module)} |" for module in modules]
        parts.append(
            "\n".join([f"## {name}", "", first_line(folder / "__init__.py"), "", "| | |", "|---|---|", *rows, ""])
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

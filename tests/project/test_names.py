"""Names in the source: every class name is defined once, folders stay small, and modules are named by nouns."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import offbeat

SOURCE = Path(offbeat.__file__).parent
MODULES = 15
"""The most modules that a folder may hold."""
NOUNS = {
    "coded", "coding", "colouring", "federated", "feed", "fencing", "matching", "mixing",
    "pacing", "ranking", "sampling", "sharding", "sided", "slicing", "training",
}  # fmt: skip
"""Nouns that look like participles, strategies' own names (`coded`, `federated`), and `two_sided`."""


def test_every_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_folder_holds_more_modules_than_a_reader_can_keep_in_mind() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) - 1 for folder in SOURCE.rglob("*") if folder.is_dir()}
    assert {str(folder.relative_to(SOURCE)): n for folder, n in counts.items() if n > MODULES} == {}


def test_modules_are_named_by_nouns() -> None:
    words = {word for path in SOURCE.rglob("*.py") for word in path.stem.strip("_").split("_")[-1:]}
    assert {word for word in words if word.endswith(("ing", "ed")) and word not in NOUNS} == set()

"""Plain English in source and pages: phrases that a native-speaking engineer would not write do not occur."""

from __future__ import annotations

import re
from pathlib import Path

import paths
import pytest

ROOT = paths.ROOT
PHRASES = {
    r"\bmanieth\b": "every n-th",
    r"\b(leave|leaves|leaving|left) away\b": "omit",
    r"\bforet(ell|ells|elling|old)\b": "predict",
    r"(?<!there )\b(is|are|was|were) no (rule|target|strategy|task|number|name|file|folder|run|worker|server|script"
    r"|schedule|league|gradient|call|way)\b(?! (left|longer|other|more))": "is not a",
    r"\b(came|come|comes) of it\b": "result",
    r"\bwills it\b": "sampled, chosen",
    r"\bletters?\b": "message, payload",
}
"""Patterns that occur nowhere, and what to write instead."""
IN_PAGES = PHRASES | {
    r"\bso many (steps|seconds|workers|others|batches|events|times|bytes)\b": "n, the given number of",
    r"\b(people's|one's) own\b": "your own, user-defined",
    r"\bleagues?\b": "comparison",
    r"\b(nobody|anybody|somebody|everybody)\b": "no worker, no one, every worker",
    r"\bgoes? on\b": "continue",
    r"\bunder way\b": "in flight, running",
}
"""Patterns that pages avoid as well."""

ALPHABET = re.compile(
    r"(lower-case|small|capital|fold|any|around|Of|tabs,|are) letters|one letter|letters, digits|letter-spacing"
    r"|letter\.charCodeAt|\(letter\)|letters = .abc|letters\[:count|len\(letters\)"
)
"""Letters of the alphabet, which may be called so."""

SOURCES = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".c", ".js", ".html", ".css"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".py") and path.stem != "modules"),
]
"""All but docs/modules.md, which quotes the source."""


def prose(path: Path) -> str:
    """A file without letters of the alphabet; a page also without code, addresses and tables of bad style."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(
            r"^\| not \| but \|\n(\|.*\n)+|^```.*?^```|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE
        )
    return ALPHABET.sub("", text)


def findings(path: Path, phrases: dict[str, str]) -> list[str]:
    text = prose(path)
    return [
        f"{path.relative_to(ROOT)}: '{match[0]}' in '{text[max(0, match.start() - 30) : match.end() + 30]}': {better}"
        for pattern, better in phrases.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def test_pages_are_in_plain_english() -> None:
    quoting = ("bars.md", "winners.md")  # Made from results, in the words of their time.
    rules = {page: PHRASES if page.suffix == ".py" or page.name in quoting else IN_PAGES for page in PAGES}
    assert [finding for page in PAGES for finding in findings(page, rules[page])] == []


@pytest.mark.parametrize("package", sorted({source.relative_to(ROOT / "src/offbeat").parts[0] for source in SOURCES}))
def test_source_is_in_plain_english(package: str) -> None:
    ours = [source for source in SOURCES if source.relative_to(ROOT / "src/offbeat").parts[0] == package]
    assert [finding for source in ours for finding in findings(source, PHRASES)] == []


@pytest.mark.parametrize(
    "words",
    [
        "in every so manieth step",
        "it may be left away",
        "6 ms foretold",
        "'x' is no target",
        "say what came of it",
        "where fortune wills it",
        "bytes of a letter",
        "for so many steps",
    ],
)
def test_a_phrase_to_avoid_is_found(words: str) -> None:
    assert any(re.search(pattern, words) for pattern in IN_PAGES)

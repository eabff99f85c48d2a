"""Twenty questions of someone who has only the tree and the glossary, and the module that each should lead to.

The first line of that module must say so in the question's own words: a move or a rename that breaks this is noticed.
"""

from __future__ import annotations

import ast

import paths
import pytest

ROOT = paths.ROOT

SOURCE = ROOT / "src" / "offbeat"
QUESTIONS = [
    ("Where is `offbeat.init()` and `team.prepare(...)`?", "team/team.py", "prepare"),
    ("What does a worker process do from start to end?", "worker/loop.py", "worker process"),
    ("Where is one run driven from settings to result?", "run/drive.py", "run"),
    ("Where are strategies written as text parsed?", "strategies/language/parser.py", "text"),
    ("Where is all-reduce as a strategy?", "strategies/allreduce.py", "gradients"),
    ("Where is the top-k compressor a user asks for?", "strategies/compressors.py", "top-k"),
    ("Who decides whether a worker may start its next step?", "protocols/servers/pacing.py", "who may start a step"),
    ("When does a worker push, pull and wait?", "protocols/servers/worker/rhythm.py", "worker"),
    ("Where are the messages between workers and servers?", "protocols/servers/messages.py", "say to each other"),
    ("Where is the ring all-reduce as a schedule?", "protocols/collectives/reductions.py", "all-reduce"),
    ("Where is a schedule proved correct?", "protocols/checker.py", "schedule"),
    ("Where do schedules run over messages?", "runtime/collectives/two_sided.py", "two-sided"),
    ("Where is shared memory between ranks laid out?", "runtime/collectives/one_sided/arena.py", "share"),
    ("Where are gradients put into buckets?", "runtime/gradients/buckets.py", "buckets"),
    ("Where are checkpoints written?", "runtime/state/checkpoint.py", "checkpoints"),
    ("What is in run.json and the run folder?", "runtime/run/folder.py", "run.json"),
    ("Where are loaders split over workers?", "runtime/data/loaders.py", "workers"),
    ("Where are stragglers found and blamed?", "monitor/stragglers.py", "held the others up"),
    ("Where are deadlocks found?", "monitor/deadlocks.py", "who waits for whom"),
    ("Where is a step's time predicted?", "simulate/predicted_step.py", "step"),
]


@pytest.mark.parametrize(("question", "path", "words"), QUESTIONS, ids=[path for _, path, _ in QUESTIONS])
def test_a_question_leads_to_a_module_whose_first_line_answers_it(question: str, path: str, words: str) -> None:
    module = SOURCE / path
    assert module.is_file(), question
    first = (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    assert words in " ".join(first.lower().split()), f"{question} {path} begins: {first}"


def test_folders_hold_about_fifteen_modules() -> None:
    sizes = {
        str(folder.relative_to(SOURCE)): sum(1 for module in folder.glob("*.py") if module.stem != "__init__")
        for folder in (SOURCE, *(path.parent for path in SOURCE.rglob("__init__.py")))
    }
    large = {folder: size for folder, size in sizes.items() if size > 17}
    assert not large, large

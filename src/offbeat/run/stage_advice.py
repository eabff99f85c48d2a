"""Findings on the stages of a run: which is the slowest, how uneven they are, what a better cut would bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from offbeat.runtime.run.folder import part
from offbeat.runtime.run.stages_in_words import slowest_in_words, stage_lines
from offbeat.simulate.stage_balance import CutAdvice, cut_advice


class StagesExplained(msgspec.Struct, frozen=True):
    """The findings on the stages of a run."""

    slowest: int
    evenness: float  # Mean time of a stage over that of the slowest, in the run.
    advice: CutAdvice | None  # None if the layers were not measured.
    lines: tuple[str, ...]  # All of it in words.

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {"slowest": self.slowest, "evenness": self.evenness, "advice": msgspec.to_builtins(self.advice)}


def explained_stages(record: Mapping[str, Any]) -> StagesExplained | None:
    """The findings for a run, from its run.json; None if its model was not cut into stages."""
    result = part(dict(record), "result")
    split: Mapping[str, Any] = result.get("split") or {}
    if "costs" not in split:  # No pipeline, or a run of an earlier version.
        return None
    advice = cut_advice(split, result.get("predicted") or {})
    words = "its layers were not measured in this run, so no better cut is known" if advice is None else advice.words
    lines = [f"  {label}: {text}" for label, text in stage_lines(split)]
    heading = f"Stages: {slowest_in_words(split)}."
    return StagesExplained(
        int(split["slowest_stage"]),
        float(split["evenness_in_run"]),
        advice,
        (heading, *lines, f"  {words[0].upper()}{words[1:]}."),
    )

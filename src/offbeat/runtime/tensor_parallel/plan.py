"""Which modules of a model are split over the ways, and which are not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import Parameter

from offbeat.errors import StrategyError, did_you_mean
from offbeat.runtime.tensor_parallel.attention import why_whole
from offbeat.runtime.tensor_parallel.chains import chains
from offbeat.runtime.tensor_parallel.cuts import Cut, divisors
from offbeat.runtime.tensor_parallel.families import (
    attention_of,
    embedding_reason,
    feed_forward_of,
    fused_by_user,
    vocabularies,
)
from offbeat.runtime.tensor_parallel.layers import is_linear, widths
from offbeat.runtime.tensor_parallel.splits import Manner, Split, cuts_of

_SAY_IT = (
    "Say what is split with Task.tensor_plan(model), which answers {module name: column, row, heads, vocabulary or "
    "whole}."
)


@dataclass(frozen=True)
class TensorPlan:
    """What is split over the ways of `tensor(ways)`."""

    ways: int
    """How many workers share the operators."""
    splits: tuple[Split, ...]
    """Modules that are split."""
    whole: Mapping[str, str]
    """Modules that stay whole, and why."""
    parameters: int
    """Numbers in the model's parameters."""
    divided: int
    """How many of them are in parameters that are split."""

    @property
    def share(self) -> float:
        """The share of the parameters that every way holds."""
        return 1 - self.divided / max(self.parameters, 1) * (1 - 1 / self.ways)

    def explain(self) -> str:
        """What is split, what is not, and why."""
        share = self.divided / max(self.parameters, 1)
        lines = [f"tensor({self.ways}): {share:.0%} of {self.parameters:,} parameters are split"]
        lines += [f"  split  {line}" for line in _grouped({split.name: _how(split) for split in self.splits})]
        lines += [f"  whole  {line}" for line in _grouped(self.whole)]
        return "\n".join(lines)


def _how(split: Split) -> str:
    fused = f" of {split.blocks} blocks" if split.blocks > 1 else ""
    return f"by {split.manner}, {split.size:,} {split.things}{fused}"


def _grouped(reasons: Mapping[str, str]) -> list[str]:
    """One line for modules whose names differ in numbers only, and that have the same reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        pattern = ".".join("*" if word.isdigit() else word for word in name.split("."))
        groups.setdefault((pattern, reason), []).append(name)
    return [
        f"{pattern if len(names) > 1 else names[0] or 'the model'}"
        f"{f' ({len(names)} times)' if len(names) > 1 else ''}: {reason}"
        for (pattern, reason), names in groups.items()
    ]


def plan(model: nn.Module, ways: int, own: Mapping[str, str] | None = None) -> TensorPlan:
    """What of a model is split over so many ways: found in its modules, or as `own` says by their names."""
    whole: dict[str, str] = {}
    splits = _automatic(model, whole) if own is None else _by_user(model, own, whole)
    splits = _without_conflicts(model, splits, whole, own is not None)
    if not splits:
        reasons = "".join(f"\n  {line}" for line in _grouped(whole))
        raise StrategyError(
            f"tensor({ways}) has nothing to split in this {type(model).__name__}: it splits chains of linear layers, "
            f"attention, and large vocabularies. {_SAY_IT}{reasons}"
        )
    _check_ways(splits, ways)
    cut = {
        id(parameter): parameter.numel()
        for split in splits
        for parameter, _ in _parameters_of(split, model.get_submodule(split.name))
    }
    for name, module in model.named_modules():
        owns = any(True for _ in module.parameters(recurse=False))
        if owns and name not in whole and not any(id(p) in cut for p in module.parameters(recurse=False)):
            whole[name] = _kept(module)
    total = sum(p.numel() for p in model.parameters())
    return TensorPlan(ways, tuple(splits), whole, total, sum(cut.values()))


def _kept(module: nn.Module) -> str:
    if is_linear(module):
        return "a linear layer outside of chains: what follows or precedes it needs all of its features"
    return f"every way needs all of {type(module).__name__}"


def _automatic(model: nn.Module, whole: dict[str, str]) -> list[Split]:
    splits: list[Split] = []
    closed: list[nn.Module] = []
    for name, module in model.named_modules():
        if any(module is sub for outer in closed for sub in outer.modules()):
            continue
        attention = attention_of(name, module, whole)
        if attention:
            splits += attention
            closed.append(module)
    for name, module in model.named_modules():
        splits += feed_forward_of(name, module, whole)
    splits += vocabularies(model, whole)
    taken = {split.name for split in splits}
    return splits + chains(model, taken | whole.keys(), closed)


def _by_user(model: nn.Module, own: Mapping[str, str], whole: dict[str, str]) -> list[Split]:
    modules = dict(model.named_modules(remove_duplicate=False))
    splits: list[Split] = []
    for name, text in own.items():
        if name not in modules:
            raise StrategyError(
                f"the tensor plan names the module {name!r}, which this {type(model).__name__} does not have."
                f"{did_you_mean(name, [known for known in modules if known])}"
            )
        if text not in list(Manner):
            raise StrategyError(
                f"the tensor plan says {name!r}: {text!r}, which is not a way to split."
                f"{did_you_mean(str(text), [manner.value for manner in Manner])}"
            )
        module, manner = modules[name], Manner(text)
        if manner is Manner.WHOLE:
            whole[name] = "the plan says so"
            continue
        split = _split(name, module, manner, model)
        if not split:
            raise StrategyError(
                f"the tensor plan says {name!r}: {text!r}, but {_cannot(module)}. Linear layers are split by column, "
                f"row or vocabulary; dropout after a column by column; attention by heads; embeddings by vocabulary."
            )
        splits += split
    return list({split.name: split for split in splits}.values())


def _split(name: str, module: Any, manner: Manner, model: nn.Module) -> list[Split]:
    if manner is Manner.HEADS:
        if is_linear(module):
            return fused_by_user(name, model)
        return attention_of(name, module, {})
    if manner is Manner.VOCABULARY and isinstance(module, nn.Embedding) and not embedding_reason(module):
        return [Split(name, manner, module.num_embeddings, "rows", name)]
    if type(module) is nn.Dropout and manner is Manner.COLUMN:
        return [Split(name, manner, 0, "features", name)]
    if not is_linear(module):
        return []
    inputs, outputs = widths(module)
    size = inputs if manner is Manner.ROW else outputs
    things = "rows" if manner is Manner.VOCABULARY else "features"
    return [Split(name, manner, size, things, name)]


def _cannot(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return embedding_reason(module) or "an embedding is split by vocabulary only"
    if isinstance(module, nn.MultiheadAttention):
        return why_whole(module) or "nn.MultiheadAttention is split by heads only"
    return f"it is a {type(module).__name__}, which cannot be split like that"


def _parameters_of(split: Split, module: nn.Module) -> list[tuple[Parameter, Cut]]:
    return [(module.get_parameter(name), cut) for name, cut in cuts_of(split, module).items()]


def _without_conflicts(model: nn.Module, splits: Iterable[Split], whole: dict[str, str], by_user: bool) -> list[Split]:
    """Splits without chains of which a parameter is also used by a module that is not split like that."""
    splits = list(splits)
    while True:
        conflict = _conflict(model, splits)
        if conflict is None:
            return splits
        split, reason = conflict
        if by_user:
            raise StrategyError(
                f"the tensor plan splits {split.name!r}, but its {reason}. Split both alike, or neither."
            )
        for each in splits:
            if each.chain == split.chain and cuts_of(each, model.get_submodule(each.name)):
                owner = "its" if each.name == split.name else f"it goes with {split.name}, whose"
                whole[each.name] = f"{owner} {reason}"
        splits = [each for each in splits if each.chain != split.chain]


def _conflict(model: nn.Module, splits: Iterable[Split]) -> tuple[Split, str] | None:
    cuts: dict[int, tuple[Cut, Split]] = {}
    modules: dict[str, nn.Module] = dict(model.named_modules())
    users: Counter[int] = Counter(id(p) for module in modules.values() for p in module.parameters(recurse=False))
    for split in splits:
        for parameter, cut in _parameters_of(split, modules[split.name]):
            known = cuts.setdefault(id(parameter), (cut, split))
            if known[0] != cut:
                return split, f"parameter is also one of {known[1].name}, which is split in another way"
            users[id(parameter)] -= 1
    for name, module in modules.items():
        for own, parameter in module.named_parameters(recurse=False):
            # What an outer module also names, it keeps for its parts.
            if users[id(parameter)] > 0 and id(parameter) in cuts and not _split_at(cuts[id(parameter)][1], name):
                reason = f"parameter is also {name or 'the model'}'s {own}, which is not split"
                return cuts[id(parameter)][1], reason
    return None


def _split_at(split: Split, name: str) -> bool:
    return split.name.startswith(f"{name}.") or not name or split.name == name


def _check_ways(splits: Iterable[Split], ways: int) -> None:
    """Refuse numbers of ways that heads or features cannot be divided by."""
    even = [split for split in splits if split.size and split.manner is not Manner.VOCABULARY]
    uneven = [split for split in even if split.size % ways]
    if uneven:
        first = uneven[0]
        common = divisors(*(split.size for split in even))
        fits = f"This model's heads and features can be divided by {_list(common)}" if common else "No number fits all"
        raise StrategyError(
            f"tensor({ways}) cannot split {first.name or 'the model'}: its {first.size} {first.things} cannot be "
            f"divided by {ways} ({_list(divisors(first.size)) or 'no number'} would), and every way has the same "
            f"number of them. {fits}. To keep modules whole: {_SAY_IT}"
        )
    for split in splits:
        if split.manner is Manner.VOCABULARY and split.size < ways:
            raise StrategyError(
                f"tensor({ways}) cannot split {split.name}: its vocabulary has {split.size} rows, less than one for "
                f"each way. Use at most {split.size} ways."
            )


def _list(numbers: Iterable[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:7], "…", shown[-1]])

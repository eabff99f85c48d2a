"""What a server checks of a state before it holds it: its layout, and that its program can be run and fits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import CheckpointError, ProgramError
from offbeat.runtime.gradients.optimizers import ELEMENT_WISE
from offbeat.runtime.servers.program_optimizer import accepted
from offbeat.runtime.servers.updater import ADD, PROGRAM, Recipe
from offbeat.runtime.state.tensor_tree import put_together

KINDS: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "float64": torch.float64}
"""Data types that servers hold."""
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Data types of state tensors, by their names in the safetensors format."""


class _TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def extras_of(state: NDArray[np.uint8]) -> dict[str, Any]:
    """What a state has beside tensors: its recipe, and the structure of its optimizer's state."""
    return json.loads(_header(state)["__metadata__"]["said"])


def _header(state: NDArray[np.uint8]) -> dict[str, Any]:
    """The header of the safetensors format."""
    return json.loads(state[8 : 8 + int.from_bytes(state[:8].tobytes(), "little")].tobytes())


def why_unusable(state: NDArray[np.uint8] | None) -> str:
    """Why a server cannot hold this state; empty if it can. Only its header is read."""
    try:
        if state is None:
            raise ValueError("it is empty")
        extra, tensors = extras_of(state), _tensors(state)
        if extra["recipe"] is None:
            return ""
        recipe = msgspec.convert(extra["recipe"], Recipe)
        held = {} if extra["state"] is None else put_together(extra["state"], tensors)
        return _why_unfit(recipe, tensors["values"], cast("Mapping[str, Mapping[str, Any]]", held))
    except ProgramError as error:
        return f"the program is refused: {error}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, CheckpointError) as error:
        return f"the state cannot be read ({type(error).__name__}: {error})"


def _tensors(state: NDArray[np.uint8]) -> dict[str, Tensor]:
    """The tensors of a state, without their numbers; raises ValueError unless they fill it."""
    plain = _header(state)
    end = 8 + int.from_bytes(state[:8].tobytes(), "little")
    metadata = plain.pop("__metadata__")
    if any(not isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not text")
    tensors: dict[str, Tensor] = {}
    used = 0
    entries = msgspec.convert(plain, dict[str, _TensorEntry])
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        kind, (start, stop) = _DTYPES[entry.dtype], entry.data_offsets
        size = math.prod(entry.shape) * kind.itemsize
        if min(entry.shape, default=0) < 0 or start != used or stop - start != size:
            raise ValueError(f"{name} has {stop - start:,} bytes for {entry.shape} numbers")
        tensors[name] = torch.empty(entry.shape, dtype=kind, device="meta")
        used = stop
    if end + used != state.nbytes:
        raise ValueError(f"it has {state.nbytes:,} bytes for tensors of {used:,}")
    return tensors


def _why_unfit(recipe: Recipe, values: Tensor, held: Mapping[str, Mapping[str, Any]]) -> str:
    if KINDS.get(recipe.kind) != values.dtype or values.dim() != 1:
        return (
            f"the state says that its values are {recipe.kind}, and has {values.dtype} of shape {tuple(values.shape)}"
        )
    if recipe.optimizer == ADD:
        return ""
    ranges = [place for group in recipe.ranges for place in group]
    if len(recipe.settings) != len(recipe.ranges) or any(not 0 <= a <= b <= len(values) for a, b in ranges):
        return f"the state has {len(recipe.settings)} groups with the ranges {ranges} of {len(values):,} values"
    if any(stop > start for (_, stop), (start, _) in pairwise(sorted(ranges))):
        return f"the state updates some values twice: its ranges overlap ({ranges})"
    if recipe.optimizer != PROGRAM:
        known = recipe.optimizer in ELEMENT_WISE
        return "" if known else f"the state needs an optimizer {recipe.optimizer!r}, which no server has"
    program, _ = accepted(recipe.program, recipe.program_hash)
    for number, vectors in held.items():
        low, high = ranges[int(number)]
        if reason := _why_other(program.states, vectors, high - low):
            return reason
    return ""


def _why_other(states: tuple[str, ...], held: Mapping[str, Any], count: int) -> str:
    """Why saved state vectors are not those of a program; empty if they are."""
    vectors = {name for name in held if name != "step"}
    if vectors != set(states):
        missing, unknown = sorted(set(states) - vectors), sorted(vectors - set(states))
        parts = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has", unknown)) if names]
        return f"the program has the states {', '.join(states) or '(none)'}, and the saved one {' and '.join(parts)}"
    if type(held.get("step")) is not int or held["step"] < 0:
        return f"the state says that step {held.get('step')!r} was the last, which is not a number of steps"
    shapes = {name: tuple(held[name].shape) for name in states if tuple(held[name].shape) != (count,)}
    return f"its states have other shapes than the {count:,} parameters they are for: {shapes}" if shapes else ""

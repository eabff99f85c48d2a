"""The trained model as a file in the run's folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from offbeat.errors import OutputError
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.team.team import Team


def write_model(state: dict[str, Tensor], team: Team) -> None:
    """The leader writes the model, loadable by safetensors alone; an earlier one stays if there is no space for it."""
    if team.folder is not None and team.group.membership.leads:
        write_tensors(state, team.folder / MODEL_FILE)


def save_model(module: nn.Module, path: Path) -> None:
    """Write a module's tensors to a file."""
    write_tensors({name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}, path)


def write_tensors(state: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a file, which is complete or as it was before."""
    state = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    draft = path.with_suffix(".draft")
    try:
        save_file(state, draft)
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise OutputError(f"{path} cannot be written: {error}. Free some space and resume the run.") from error

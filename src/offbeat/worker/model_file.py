"""The trained model as a file in the run's folder."""

from __future__ import annotations

from contextlib import suppress

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from offbeat.errors import OutputError
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.team.team import Team


def write_model(state: dict[str, Tensor], team: Team) -> None:
    """The leader writes the model, loadable by safetensors alone; an earlier one stays if there is no space for it."""
    if team.folder is None or not team.group.membership.leads:
        return
    state = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    path = team.folder / MODEL_FILE
    draft = path.with_suffix(".draft")
    try:
        save_file(state, draft)
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise OutputError(f"{path} cannot be written: {error}. Free some space and resume the run.") from error

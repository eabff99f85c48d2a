"""Agents behind a command: ssh or srun, whose standard input is the agent's."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence

from offbeat.errors import UsageError

FAREWELL = 3.0
"""Seconds that the command has to end by itself."""
_LONGEST = 2000


class CommandAgent:
    """An agent that runs as long as a command does."""

    def __init__(self, name: str, command: Sequence[str], settings: bytes) -> None:
        self._name = name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._output, stderr=self._output,
                start_new_session=True,  # The terminal's Ctrl-C is for the launcher alone.
            )  # fmt: skip
        except OSError as error:
            self._output.close()
            raise UsageError(f"{command[0]} cannot be run: {error.strerror}. Install it, or run elsewhere.") from error
        assert self._process.stdin is not None  # noqa: S101 (a pipe)
        self._input = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # `ended` says why.
            self._input.write(settings)
            self._input.flush()

    def ended(self) -> str | None:
        """How the command has ended, and what it said last; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._output.seek(0)
        said = self._output.read()[-_LONGEST:].decode(errors="replace").strip()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self._name} ended with {how}" + (f" and said: {said}" if said else "")

    def end(self) -> None:
        """Close the agent's standard input, at which it ends, and kill the command if that takes too long."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

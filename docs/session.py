"""Write docs/session.md: frames of a real terminal in which run, explain and compare are typed one after the other.

Needs tmux. `python docs/session.py` takes about a minute.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
COLUMNS, LINES = 104, 46
SOCKET = f"offbeat-session-{os.getpid()}"

INTRODUCTION = """\
# A session

Screens of a terminal, captured with tmux from real runs on a busy machine with two cores by `python docs/session.py`.
The [tutorial](tutorial.md) explains the same commands step by step.
"""
SCENES = [
    (
        "Run",
        "Two workers learn handwritten digits. Worker 1 is slowed down: each of its steps takes at least 150 ms.",
        'offbeat run offbeat.tasks.digits --workers 2 --monitor --disturb "worker 1: pace 150ms"',
    ),
    ("Explain", "The monitor names the straggler and what it cost.", "offbeat explain runs/latest"),
    (
        "Compare",
        "Same seeds, data and initial model for all. `ddp` runs twice to show the noise; `single` is one worker alone.",
        'offbeat compare offbeat.tasks.digits --workers 2 --strategy allreduce --strategy "local(8)" --seeds 3'
        " --tune none",
    ),
]


def tmux(*words: str) -> str:
    """Run a tmux command on our own server, and return its output."""
    return subprocess.run(["tmux", "-L", SOCKET, *words], check=True, capture_output=True, text=True).stdout


def screen() -> str:
    """The text on the screen now."""
    return "\n".join(line.rstrip() for line in tmux("capture-pane", "-p", "-J").splitlines()).strip()


def busy() -> bool:
    """Whether the shell is still running a command."""
    return tmux("display-message", "-p", "#{pane_current_command}").strip() != "bash"


def typed(command: str) -> list[str]:
    """Type a command on a cleared screen; return every different screen until the prompt is back."""
    tmux("send-keys", "clear", "Enter")
    time.sleep(0.5)
    tmux("send-keys", "-l", command)
    tmux("send-keys", "Enter")
    frames, deadline = [screen()], time.monotonic() + 600
    time.sleep(0.3)
    while busy():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{command} takes longer than 600 s")
        if (frame := screen()) != frames[-1]:
            frames.append(frame)
        time.sleep(0.2)
    return [*frames, screen().removesuffix("\n$")]


def shown(frames: list[str]) -> list[str]:
    """The last screen, after one from the middle of the run if that shows something else."""
    during = [frame for frame in frames[:-1] if frame.count("\n") >= 2 and frame not in frames[-1]]
    return [*during[len(during) // 2 :][:1], frames[-1]]


def main() -> None:
    """Record all scenes and write the page."""
    parts = [INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        shell = shlex.join(["env", f"PATH={path}", "PS1=$ ", "bash", "--norc", "--noprofile"])
        tmux("-f", "/dev/null", "new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), "-c", folder, shell)
        try:
            for title, words, command in SCENES:
                frames = [re.sub(r"token=[\w-]+", "token=…", frame) for frame in shown(typed(command))]
                blocks = "\n\nA moment later:\n\n".join(f"```text\n{frame}\n```" for frame in frames)
                parts.append(f"## {title}\n\n{words}\n\n{blocks}\n")
        finally:
            tmux("kill-server")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The launcher's side of the fork server: spawning it, sending to it, ending it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from offbeat.runtime.launch._messages import Channel, FromServer, LauncherHello, ToServer

SEND_DEADLINE = 30  # Seconds that the fork server may leave a message unread.
CLOSE_DEADLINE = 10.0  # Seconds that the fork server has to exit; more than it gives its children.


class ServerGoneError(Exception):
    """The fork server has ended or does not listen; the run turns this into an error with the reason."""


class ForkServerLink:
    """One fork server, as its launcher sees it."""

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_DEADLINE, 0))
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        try:
            self._process = _spawn(theirs.fileno(), self._output.fileno())
        except BaseException:
            ours.close()
            self._output.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.channel: Channel[FromServer] = Channel(ours, FromServer, "the fork server")
        self.preload = tuple(preload)
        self.is_ready = False  # Whether its imports are done.
        self.is_usable = True  # Whether it can still be used for a run.
        with contextlib.suppress(ServerGoneError):  # The first run will report the reason.
            self.send(LauncherHello(list(preload), [entry or str(Path.cwd()) for entry in sys.path]))

    def send(self, message: ToServer, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and open files, to the fork server."""
        try:
            self.channel.send(message, descriptors)
        except OSError as error:
            self.channel.ended = self.channel.ended or isinstance(error, ConnectionError)
            raise ServerGoneError from error

    def obituary(self) -> str:
        """How the fork server ended, and the end of its output."""
        self.kill()
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._output.seek(0)
        last = self._output.read()[-2000:].decode(errors="replace").strip()
        return f"The fork server, which starts all processes of a run, {how}." + (f" It said:\n{last}" if last else "")

    def kill(self) -> None:
        """End the fork server now, if it has not ended; the kernel then ends its children."""
        self.is_usable = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that is just ending may still report how: a process closes its sockets before it is gone.
            self._process.wait(1 if self.channel.ended else 0)
        self._process.kill()
        self._process.wait(CLOSE_DEADLINE)

    def close(self) -> None:
        """End the fork server and free everything held for it."""
        self.channel.close()
        try:
            if not self.is_ready:
                self._process.kill()  # It has no children yet, and does not listen while it imports.
            self._process.wait(CLOSE_DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()
        finally:
            self.is_usable = False
            self._output.close()


def _spawn(descriptor: int, output: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        # numpy's OpenBLAS starts its threads when imported, and a process with threads cannot fork safely.
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "offbeat.runtime.launch._server", str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        pass_fds=(descriptor,),
        start_new_session=True,  # The terminal's Ctrl-C is for the launcher alone.
    )

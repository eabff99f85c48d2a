"""The user's code on its way to machines: an archive of plain files, hashed, bounded, and unpacked without escapes."""

from __future__ import annotations

import hashlib
import io
import stat
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from offbeat.errors import UsageError

LARGEST = 256 * 1024 * 1024
"""Bytes of shipped files together."""
MOST = 20_000
"""Number of shipped files."""
_SKIPPED = {".git", "__pycache__", ".venv", "node_modules", "runs"}


def tracked(folder: Path) -> list[Path]:
    """The files of a folder that git tracks; all of them, without hidden ones, if it is not a git repository."""
    done = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--", "."],
        capture_output=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode == 0 and done.stdout:
        files = [folder / name.decode() for name in done.stdout.split(b"\0") if name]
    else:
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if not any(part in _SKIPPED or part.startswith(".") for part in path.relative_to(folder).parts)
        ]
    return [path for path in files if path.is_file() and not path.is_symlink()]


def packed(folder: Path) -> bytes:
    """A folder's code as an archive; refused if it is too large to be code."""
    files = tracked(folder)
    size = sum(path.stat().st_size for path in files)
    if not files:
        raise UsageError(f"--ship {folder}: there are no files to send. Give the folder of your code.")
    if size > LARGEST or len(files) > MOST:
        raise UsageError(
            f"--ship {folder}: {len(files):,} files of {size / 1e6:,.0f} MB are more than code; at most {MOST:,} files "
            f"of {LARGEST / 1e6:,.0f} MB are sent. Give a folder with code only; data must be on the machines already."
        )
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=3) as tar:
        for path in files:
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            data = path.read_bytes()
            member.size, member.mode = len(data), 0o700 if path.stat().st_mode & stat.S_IXUSR else 0o600
            tar.addfile(member, io.BytesIO(data))
    return archive.getvalue()


def digest_of(archive: bytes) -> str:
    """The hash by which both sides know that it is the same code."""
    return hashlib.blake2b(archive, digest_size=32).hexdigest()


class Unpacking:
    """An archive that arrives in pieces, and is unpacked when it is whole and what it should be."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._archive = folder, bytearray()

    def take(self, digest: str, data: bytes, last: bool) -> None:
        """One more piece."""
        self._archive += data
        if len(self._archive) > LARGEST:
            raise UsageError(f"shipped code of more than {LARGEST:,} bytes")
        if last:
            archive = bytes(self._archive)
            self._archive.clear()
            if digest_of(archive) != digest:
                raise UsageError("shipped code whose hash is not that of what was sent")
            unpack(archive, self._folder)


def unpack(archive: bytes, folder: Path) -> None:
    """Write the files of an archive below a folder; anything but plain files inside it is refused."""
    size = 0
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for count, member in enumerate(tar, 1):
            path = PurePosixPath(member.name)
            if not member.isreg() or path.is_absolute() or ".." in path.parts or "\0" in member.name:
                raise UsageError(f"shipped code with {member.name!r}, which is not a plain file inside its folder")
            size += member.size
            if size > LARGEST or count > MOST:
                raise UsageError(f"shipped code of more than {MOST:,} files or {LARGEST:,} bytes")
            source = tar.extractfile(member)
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Never through a link, and never over a file: each name comes once.
            with target.open("xb") as file:
                file.write(b"" if source is None else source.read())
            target.chmod(member.mode & 0o700)

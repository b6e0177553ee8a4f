"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sapwood.errors import SapwoodError

_WHY = {
    errno.ENOSPC: ("the disk is full", "Free some space or choose another folder"),
    errno.EDQUOT: ("the disk quota is used up", "Free some space or choose another folder"),
    errno.EROFS: ("the file system is read-only", "Choose a folder you can write to"),
    errno.EACCES: ("permission is denied", "Choose a folder you can write to"),
    errno.EPERM: ("permission is denied", "Choose a folder you can write to"),
    errno.ENOTDIR: ("a part of the path is not a folder", "Choose another path"),
    errno.EISDIR: ("it is a folder", "Choose another name"),
    errno.EFBIG: ("the file would be larger than allowed", "Raise the limit or choose another folder"),
}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the path given; when all went well it becomes ``path``, otherwise ``path`` stays as it was."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        flush(temporary)
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        _discard(temporary)
        raise write_error(path, error) from error
    except BaseException:
        _discard(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_error(path: Path, error: OSError) -> SapwoodError:
    why, remedy = _WHY.get(error.errno or 0, (error.strerror or str(error), "Check the path"))
    return SapwoodError(f"{path}: could not be written, {why}. What was there before is untouched. {remedy}.")


def flush(path: Path) -> None:
    """Make sure that a file's or folder's content has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current

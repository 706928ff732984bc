"""Whether a checkpoint file is whole: a seal at its end, and the archive's own checksums where there is none.

A checkpoint is a zip archive. torch does not compare the checksums in it when it reads, so a flipped bit becomes a
weight. Here a file is checked before anything of it is loaded. Those that this package writes end with a **seal**, the
archive's comment::

    lightning_fuse crc32 89abcdef

over every byte before those eight digits, so a cut or a flip anywhere is seen, in padding and directory too. torch,
Lightning and every zip tool read such a file as they do without it. A file without a seal, which is one of stock
Lightning's, is held to the checksums of its members.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

SEAL = b"lightning_fuse crc32 "
DIGITS = 8
SEAL_BYTES = len(SEAL) + DIGITS
# The record at the end of every zip archive; its last two bytes are the length of the comment behind it.
END_BYTES = 22
END_MARK = b"PK\x05\x06"
CHUNK = 1 << 22

# Files of this process that were found whole or written whole: (device, inode, bytes, time) tells one from the next.
_known: set[tuple[int, int, int, int]] = set()


class DamagedCheckpointError(ValueError):
    """A checkpoint file is cut, altered or no checkpoint at all. Nothing of it has been loaded."""


class SealedWriter:
    """Writes an archive through to a file and seals it; give it to ``torch.save`` in place of the file.

    Args:
        file: Open for writing, empty.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = b""  # what was written last, held back: the seal changes the archive's last record
        self._sum = 0

    def write(self, data: bytes | memoryview) -> int:
        """Takes the next bytes of the archive.

        Args:
            data: Any number of bytes.

        Returns:
            Their number.

        Raises:
            OSError: The disk is full, or the file too large.
        """
        view = memoryview(data).cast("B")
        if len(view) < END_BYTES:
            joined = self._end + bytes(view)
            self._put(joined[:-END_BYTES])
            self._end = joined[-END_BYTES:]
        else:
            self._put(self._end)
            self._put(view[:-END_BYTES])
            self._end = bytes(view[-END_BYTES:])
        return len(view)

    def flush(self) -> None:
        """Hands everything but the held-back end to the system."""
        self._file.flush()

    def seal(self) -> None:
        """Writes the end of the archive with the seal behind it.

        Raises:
            OSError: The disk is full.
            RuntimeError: What was written is no zip archive.
        """
        if not self._end.startswith(END_MARK) or self._end[-2:] != b"\0\0":
            raise RuntimeError("only a zip archive without a comment can be sealed; write it with torch.save")
        self._put(self._end[:-2] + SEAL_BYTES.to_bytes(2, "little") + SEAL)
        self._file.write(_digits(self._sum))
        self._file.flush()

    def _put(self, data: bytes | memoryview) -> None:
        self._sum = zlib.crc32(data, self._sum)
        self._file.write(data)


def verify(path: str | Path) -> None:
    """Checks that a checkpoint file is whole; one that this process has found whole is not read again.

    Args:
        path: The file.

    Raises:
        DamagedCheckpointError: It is not; the message says in what way.
        OSError: It cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        mark = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if mark in _known:
            return
        if status.st_size == 0:
            raise _damaged(path, "it is empty")
        tail = _tail(file, status.st_size)
        if tail[-SEAL_BYTES:].startswith(SEAL):
            if _sum_of(file, status.st_size - DIGITS) != tail[-DIGITS:]:
                raise _damaged(path, "its bytes are not those that were written, the checksum of the file differs")
        elif not tail[-END_BYTES:].startswith(END_MARK) or tail[-2:] != b"\0\0":
            raise _damaged(path, "it ends before its end, or is no checkpoint at all")
        else:
            _verify_members(path)
    _known.add(mark)


def is_whole(path: str | Path) -> bool:
    """Whether ``verify`` has nothing to say against a file."""
    try:
        verify(path)
    except (DamagedCheckpointError, OSError):
        return False
    return True


def remember_whole(path: Path) -> None:
    """Spares reading a file again that this process has just written and forced to disk.

    Args:
        path: The file under its final name.
    """
    with contextlib.suppress(OSError):
        status = path.stat()
        _known.add((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


def _tail(file: BinaryIO, size: int) -> bytes:
    file.seek(max(0, size - SEAL_BYTES - END_BYTES))
    return file.read()


def _sum_of(file: BinaryIO, count: int) -> bytes:
    """The digits that belong to the first so many bytes of a file."""
    file.seek(0)
    total, buffer = 0, memoryview(bytearray(CHUNK))
    while count > 0:
        got = file.readinto(buffer[: min(CHUNK, count)])  # type: ignore[attr-defined]
        if not got:
            break
        total, count = zlib.crc32(buffer[:got], total), count - got
    return _digits(total)


def _verify_members(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError, RuntimeError, zlib.error) as error:
        raise _damaged(path, f"its directory is altered ({error})") from error
    if broken is not None:
        raise _damaged(path, f"the checksum of its part {broken} differs")


def _digits(total: int) -> bytes:
    return b"%08x" % total


def _damaged(path: Path, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} is not a complete checkpoint; give another one, or its run folder to use the newest that is ({reason})"
    )

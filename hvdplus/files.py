"""Files that a user names."""

from __future__ import annotations

import errno
import os
import stat


def content(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a file, or of a pipe that somebody writes into (``<(zcat run.jsonl.gz)``).

    Raises:
        OSError: it cannot be read; or it is a pipe, and nobody writes into it.
    """
    # To open a pipe, or to read one, would wait for a writer for ever.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return file.read()
        try:
            first = os.read(file.fileno(), 1)
        except BlockingIOError:  # there is a writer, who has not begun
            first = b""
        else:
            if not first:
                raise OSError(errno.EPIPE, "nobody writes into this pipe", os.fspath(path))
        os.set_blocking(file.fileno(), True)
        return first + file.read()

"""What happens in a run, told and written down; and nobody else works in its folder."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sapwood.errors import SapwoodError, explain
from sapwood.storage.atomic import write_text

Report = Callable[[dict[str, Any]], None]
"""Told what happens: an event as a dict; progress as {"event": "step", ...} and {"event": "planning", ...}."""


class Log:
    """Events as JSON lines; a line that was cut off by a kill is dropped. Progress is told and not written."""

    def __init__(self, path: Path, report: Report | None) -> None:
        self.path, self.report = path, report
        if path.exists():
            whole = path.read_bytes()
            if not whole.endswith(b"\n"):
                write_text(path, whole[: whole.rfind(b"\n") + 1].decode())

    def __call__(self, event: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"time": now, **event}) + "\n")
        except OSError as error:
            raise SapwoodError(f"{self.path}: could not be written ({error.strerror}). Free some space.") from None
        self.tell(**event)

    def tell(self, **event: Any) -> None:
        if self.report is not None:
            self.report(event)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two processes must not work in the same folder."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            remedy = "Wait for it, or stop it first."
            raise explain("a folder that no other run works in", "one in use", remedy, str(folder)) from None
        yield

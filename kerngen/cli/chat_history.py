"""What was typed in chats, for the next one: a file that its owner alone can read."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kerngen.system.files import locked, make_folder, publish_with, read_regular, require_regular

MAX_BYTES = 1 << 20  # of the file; once it holds more, its newest half stays
MAX_ENTRY_BYTES = 1 << 16  # what is longer was pasted, and would push out what was typed
_MODE = 0o600


def history_path() -> Path:
    """Where it lies: in the user's state folder (~/.local/state/kerngen on Linux)."""
    import platformdirs

    return Path(platformdirs.user_state_dir("kerngen", appauthor=False)) / "chat_history.jsonl"


class HistoryFile:
    """A file of JSON texts, one a line, the newest last. Several chats may add to it at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = path.with_name(f".{path.name}.lock")
        self._newest: str | None = None  # of this chat

    def read(self) -> tuple[list[str], int]:
        """The entries, oldest first, and how many lines are none. Nothing where there is no file. Raises OSError."""
        try:
            with locked(self._lock):
                lines = read_regular(self.path, MAX_BYTES + MAX_ENTRY_BYTES).splitlines()
        except FileNotFoundError:
            return [], 0
        entries = [entry for line in lines if (entry := _entry(line)) is not None]
        return entries, len(lines) - len(entries)

    def add(self, text: str) -> None:
        """Keep `text`, unless it is what was added last, or longer than MAX_ENTRY_BYTES. Raises OSError."""
        line = f"{json.dumps(text)}\n".encode()
        if text == self._newest or len(line) > MAX_ENTRY_BYTES:
            return
        self._newest = text
        make_folder(self.path.parent)
        with locked(self._lock):
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, _MODE)
            with open(fd, "ab") as file:
                require_regular(fd, self.path)
                os.fchmod(fd, _MODE)  # whoever made it
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":  # its last line was cut off
                    line = b"\n" + line
                file.write(line)
            if size + len(line) > MAX_BYTES:
                self._shorten()

    def _shorten(self) -> None:
        data = self.path.read_bytes()
        newest = data[data.index(b"\n", len(data) - MAX_BYTES // 2) + 1 :]
        publish_with(lambda file: file.write(newest), self.path, mode=_MODE)


def _entry(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, str) else None

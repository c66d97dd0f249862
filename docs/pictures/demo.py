"""README's recording of kerngen at work: what really ran on a terminal, and the picture of it that moves.

    python docs/pictures/demo.py record     runs COMMANDS on a pseudo-terminal, with nothing tuned or compiled before;
                                            writes demo.cast (asciicast v2): what was shown, and when, five times a
                                            second
    python docs/pictures/demo.py draw       makes demo.svg of it: the same bytes of the same recording

Where the recording waits, the picture waits less (GAP_S), and what ran long is shown faster (COMMAND_S).
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import pwd
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

from screen import Line, Screen, Style, written

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMMANDS = (  # make demo's, in the checkpoint's folder, with a budget that a film has the time for
    "kerngen tune --arch sm70 --model gemma-4-31b --time-budget 3m",
    'kerngen run gemma-4-tiny-w4a16 --draft gemma-4-tiny-assistant \\\n>   --prompt "$(cat prompt.txt)"',
)
COLUMNS, ROWS = 80, 28
PROMPT = "\x1b[1;32m$\x1b[0m "
KEY_S = 0.03  # between two typed characters
GAP_S, COMMAND_S, END_S = 0.5, 6.0, 6.0  # as shown: of a wait, of a command, of the last picture
FRAME_S = 0.14
KEPT_S = 0.2  # of the recording: what changes more often is kept this often

# ---- recording


def record() -> list[str]:
    """The lines of an asciicast. Raises SystemExit where a command fails, or shows what is this machine's own."""
    events: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory(prefix="kg-demo-") as home:
        folder = Path(home) / "tiny"
        folder.mkdir()
        for path in (ROOT / "examples" / "tiny").iterdir():
            (folder / path.name).symlink_to(path)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KERNGEN_", "COLUMNS", "LINES"))}
        environment |= {"HOME": home, "TERM": "xterm-256color", "KERNGEN_DB": "tuning.db",
                        "KERNGEN_CACHE_DIR": f"{home}/cache", "PYTHONPATH": str(ROOT)}  # fmt: skip
        now, screen = 0.0, Screen(COLUMNS, ROWS)
        for command in COMMANDS:
            events.append((now, PROMPT))
            for c in command:
                now += KEY_S
                events.append((now, "\r\n" if c == "\n" else c))
            events.append((now + 0.3, "\r\n"))
            now += 0.3
            for _, text in events[-len(command) - 2 :]:
                screen.write(text)
            events += [
                (now + at, text)
                for at, text in _thinned(_shown(command.replace("\\\n>", ""), folder, environment), screen)
            ]
            now = events[-1][0] + 0.5
        whole = "".join(text for _, text in events)
        for own in (home, str(ROOT), os.path.expanduser("~"), socket.gethostname(), pwd.getpwuid(os.getuid()).pw_name):
            if re.search(rf"(?<![\w-]){re.escape(own)}(?![\w-])", whole):
                raise SystemExit(f"the recording shows {own}, which is this machine's own")
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "kerngen tunes for a V100, and runs Gemma-4"}
    return [json.dumps(line) for line in (head, *([round(at, 3), "o", text] for at, text in events))]


def _thinned(shown: Iterator[str], screen: Screen) -> Iterator[tuple[float, str]]:
    """(seconds since it began, what changes the rows that differ) every KEPT_S at most, and at the end."""
    began = time.monotonic()
    at = last = 0.0
    before = screen.lines()
    for text in shown:
        now = time.monotonic() - began
        if now - last >= KEPT_S and screen.lines() != before:
            yield at, _change(before, screen)
            before, last = screen.lines(), now
        screen.write(text)
        at = now
    yield at, _change(before, screen)


def _change(before: tuple[Line, ...], screen: Screen) -> str:
    rows = enumerate(zip(before, screen.lines(), strict=True))
    return "".join(f"\x1b[{y + 1};1H\x1b[2K{written(new)}" for y, (old, new) in rows if old != new) + screen.cursor


def _shown(command: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """What `command` writes to a terminal, as it comes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(["sh", "-c", command], cwd=folder, env=environment, stdin=theirs, stdout=theirs,
                               stderr=theirs, start_new_session=True)  # fmt: skip
    os.close(theirs)
    rest = b""
    while True:
        select.select([ours], [], [])
        try:
            rest += os.read(ours, 1 << 16)
        except OSError:  # EIO: the other side is closed
            break
        text = rest.decode(errors="ignore")  # but for a character whose end is yet to come
        rest = rest[len(text.encode()) :]
        if text:
            yield text
    os.close(ours)
    if code := process.wait():
        raise SystemExit(f"{command}: exit code {code}")


# ---- drawing

CELL, LEADING, PAD, BAR = 8.4, 18.0, 16.0, 30.0  # a character's width, a line's height, the margins, the title's bar
BACK, INK, DIM = "#0d1117", "#d7dee6", "#8b949e"
PALETTE = (
    "#6e7681", "#ff7b72", "#3fb950", "#d29922", "#79c0ff", "#d2a8ff", "#56d4dd", "#d7dee6",
    "#8b949e", "#ffa198", "#56d364", "#e3b341", "#a5d6ff", "#e2c5ff", "#8ee5ec", "#ffffff",
)  # fmt: skip
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def draw(cast: str) -> str:
    """An SVG that shows the recording again and again, and its end where nothing may move."""
    head, *events = (json.loads(line) for line in cast.splitlines())
    frames, ends = _frames(head["width"], head["height"], [(at, text) for at, _, text in events])
    ids: dict[Line, str] = {}
    film = []
    height = head["height"] * LEADING
    for n, lines in enumerate(frames):
        placed = [(y, ids.setdefault(line, f"l{len(ids)}")) for y, line in enumerate(lines) if line]
        uses = "".join(f'<use href="#{id}" y="{y * LEADING:g}"/>' for y, id in placed)
        film.append(f'<g transform="translate(0 {n * height:g})">{uses}</g>')
    whole = ends[-1]
    starts = [0.0, *ends[:-1]]
    keys = "".join(f"{100 * at / whole:.2f}%{{transform:translateY({-n * height:g}px)}}" for n, at in enumerate(starts))
    last = f"translateY({-(len(frames) - 1) * height:g}px)"
    wide, high = head["width"] * CELL + 2 * PAD, height + BAR + PAD
    lights = "".join(f'<circle cx="{PAD + 6 + 18 * i:g}" cy="15" r="5.5" fill="{c}"/>'
                     for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840")))  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}" '
        f'role="img" aria-labelledby="t"><title id="t">{escape(head["title"])}</title>\n'
        f"<style>text{{font:14px {FONT};fill:{INK};white-space:pre}}.b{{font-weight:600}}.d{{fill:{DIM}}}"
        f"{''.join(f'.c{i}{{fill:{c}}}' for i, c in enumerate(PALETTE))}"
        f".film{{transform:{last};animation:f {whole:.2f}s step-end infinite}}@keyframes f{{{keys}}}"
        f"@media (prefers-reduced-motion:reduce){{.film{{animation:none}}}}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>{lights}\n'
        f"<defs>{''.join(_defined(id, line) for line, id in ids.items())}</defs>\n"
        f'<svg x="{PAD:g}" y="{BAR:g}" width="{head["width"] * CELL:g}" height="{height:g}">'
        f'<g class="film">{"".join(film)}</g></svg></svg>\n'
    )


def _frames(columns: int, rows: int, events: list[tuple[float, str]]) -> tuple[list[tuple[Line, ...]], list[float]]:
    """The pictures that differ, and when each ends, in seconds as shown."""
    screen = Screen(columns, rows)
    frames: list[tuple[Line, ...]] = [screen.lines()]
    ends = [0.0]
    for at, text in _as_shown(events):
        if at - (ends[-2] if len(ends) > 1 else 0.0) >= FRAME_S and screen.lines() != frames[-1]:
            ends[-1] = max(ends[-1], ends[-2] + FRAME_S if len(ends) > 1 else FRAME_S)
            frames.append(screen.lines())
            ends.append(at)
        ends[-1] = at
        screen.write(text)
    if screen.lines() != frames[-1]:
        frames.append(screen.lines())
        ends.append(ends[-1])
    ends[-1] += END_S
    return frames, ends


def _as_shown(events: list[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """With waits cut short, and each command's output in COMMAND_S at most."""
    parts: list[list[tuple[float, str]]] = []  # each begins with a prompt
    for event in events:
        if event[1] == PROMPT or not parts:
            parts.append([])
        parts[-1].append(event)
    now = 0.0
    for part in parts:
        enter = max(i for i, (_, text) in enumerate(part) if text == "\r\n" and i < _end_of_typing(part) + 1)
        steps = [min(b[0] - a[0], GAP_S) for a, b in pairwise(part)]
        ran = sum(steps[enter:])
        faster = min(1.0, COMMAND_S / ran) if ran else 1.0
        for i, (_, text) in enumerate(part):
            yield now, text
            if i < len(steps):
                now += steps[i] * (faster if i >= enter else 1.0)
        now += GAP_S


def _end_of_typing(part: list[tuple[float, str]]) -> int:
    """Where the command is entered: characters come one by one until then."""
    return next((i for i, (_, text) in enumerate(part[1:], 1) if len(text) > 1 and text != "\r\n"), len(part)) - 1


def _defined(id: str, line: Line) -> str:
    x, found = 0, []
    for text, style in line:
        room = len(text) - len(text.lstrip())
        shown = text.strip()
        if shown:
            found.append(f'<text x="{(x + room) * CELL:g}" y="14" textLength="{len(shown) * CELL:g}"{_class(style)}>'
                         f"{escape(shown, quote=False)}</text>")  # fmt: skip
        x += len(text)
    return f'<g id="{id}">{"".join(found)}</g>'


def _class(style: Style) -> str:
    names = [f"c{style.colour}"] if isinstance(style.colour, int) else []
    names += ["b"] * style.is_bold + ["d"] * (style.is_dim and style.colour is None)
    fill = f' fill="{style.colour}" style="fill:{style.colour}"' if isinstance(style.colour, str) else ""
    return (f' class="{" ".join(names)}"' if names else "") + fill


def main(verb: str) -> None:
    if verb == "record":
        (HERE / "demo.cast").write_text("\n".join(record()) + "\n")
    if verb not in ("record", "draw"):
        raise SystemExit(__doc__)
    (HERE / "demo.svg").write_text(draw((HERE / "demo.cast").read_text()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")

"""The picture of the chat page in docs/media.md: a server of a tiny checkpoint, asked in a headless Chromium.

    python docs/pictures/page.py            writes page.png

It needs kerngen[serve,media], and a browser where tests/host/browser.py looks for one.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TINY = ROOT / "examples" / "tiny"
SHOWN = (("cross.png", "image/png", "What is this?"), ("tone.wav", "audio/wav", "What do you hear?"))
SIZE = {"width": 720, "height": 900}  # of the window, in CSS pixels

sys.path.insert(0, str(ROOT / "tests" / "host"))
from browser import MISSING, Page, browsing, find_browser  # noqa: E402
from served import served  # noqa: E402

DROP = """(async (name, type, data) => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, {type}));
  page.ask.dispatchEvent(new DragEvent("drop", {bubbles: true, cancelable: true, dataTransfer: files}));
})"""


def ask(page: Page, name: str, kind: str, question: str) -> None:
    """Drop a file of the tiny checkpoint's on the page, ask about it, and wait for the answer."""
    data = base64.b64encode((TINY / name).read_bytes()).decode()
    page.ask(f"{DROP}({json.dumps(name)}, {json.dumps(kind)}, {json.dumps(data)})")
    page.until("added.length === 1")
    page.ask("page.ask.focus()")
    page.type(question)
    page.press("Enter")
    page.until("running === null", 60)


def main() -> None:
    """Serve, ask, and write the picture. Raises SystemExit where there is no browser."""
    if (executable := find_browser()) is None:
        raise SystemExit(MISSING)
    model = str(TINY / "gemma-4-tiny-unified")
    with browsing(executable) as page, served("--media", "images,audio", "--context", "1024", model=model) as server:
        for _ in range(2):  # the second time with all loaded
            page.open(f"{server.url}/", **SIZE)
            page.until("takes")
            page.ask("messages.length && page.clear.click()")
            for shown in SHOWN:
                ask(page, *shown)
        page.ask("page.ask.blur()")
        page.picture(HERE / "page.png")
        print(page.ask("document.querySelector('main')?.innerText ?? document.body.innerText"))


if __name__ == "__main__":
    main()

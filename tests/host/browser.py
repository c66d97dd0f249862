"""A headless Chromium that tests drive over a pipe, by its DevTools protocol, with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = f"no browser is installed ({', '.join(NAMES)} on the PATH, or KERNGEN_TEST_BROWSER=FILE)"
ANSWER_S = 60.0

# Text and what lies behind it, as the browser painted them: the worst ratio, and where.
_CONTRAST = """((texts) => {
  const canvas = document.createElement("canvas").getContext("2d");
  const rgb = (css) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const style = getComputedStyle(e);
    let back = behind(e);
    if (e.classList.contains("within")) back = rgb(getComputedStyle(e.previousElementSibling).fill);
    const [a, b] = [light(rgb(e.namespaceURI.endsWith("svg") ? style.fill : style.color)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, `${e.tagName} ${e.getAttribute("class")}: ${e.textContent.slice(0, 40)}`];
  }
  return worst;
})"""


def find_browser() -> str | None:
    """The one that $KERNGEN_TEST_BROWSER names, or the first of NAMES on the PATH."""
    if named := os.environ.get("KERNGEN_TEST_BROWSER"):
        return named
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. errors: what its scripts and its policy complained of. requests: every address that it asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._to, self._from, self._rest, self._count = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def before(self, script: str) -> None:
        """Run `script` on every page opened from now on, before its own."""
        self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, path: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show the file or the address, and wait until it is loaded. width, height: of the window, in CSS pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                   mobile=width < 600)  # fmt: skip
        self._loaded = False
        self._call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while not self._loaded:
            self._event(self._read())

    def ask(self, expression: str) -> Any:
        """What `expression` is on the page, as JSON has it. Raises RuntimeError where it throws."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "it throws"))
        return answer["result"].get("value")

    def contrast(self, texts: str) -> tuple[float, str]:
        """The worst ratio between a text that this selector finds and what lies behind it, and where that is."""
        ratio, where = self.ask(f"{_CONTRAST}({json.dumps(texts)})")
        return ratio, where

    def move(self, x: float, y: float) -> None:
        """The pointer to a place in the window."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        """The text into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Enter, Escape or Tab, down and up."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": "\r"} if key == "Enter" else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def until(self, expression: str, seconds: float = 10.0) -> Any:
        """What `expression` is on the page once that is true. Raises TimeoutError with what the page shows."""
        end = time.monotonic() + seconds
        while not (found := self.ask(expression)):
            if time.monotonic() > end:
                shown = self.ask("document.body.innerText")
                raise TimeoutError(f"{expression}: {found!r} after {seconds:g} s, on a page that shows\n{shown}")
            time.sleep(0.02)
        return found

    def forget(self, origin: str) -> None:
        """What pages of `origin` (scheme, host and port) have stored."""
        self._call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")

    def picture(self, path: Path) -> None:
        """A PNG of the window."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    # -- the pipe: JSON messages, each with a zero byte behind it

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while (answer := self._read()).get("id") != self._count:
            self._event(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not (more := os.read(self._from, 1 << 20)):
                raise RuntimeError("the browser is gone")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _event(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])


@contextmanager
def browsing(executable: str, seconds: float = ANSWER_S) -> Iterator[Page]:
    """A browser of its own, with a profile that is gone with it; it is ended where it takes longer than `seconds`."""
    with tempfile.TemporaryDirectory(prefix="kg-browser-", ignore_cleanup_errors=True) as profile:
        asked, to_browser = os.pipe()
        from_browser, answered = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
                 "--disable-background-networking", "--force-color-profile=srgb", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}"]  # fmt: skip
        # The pipe's ends are file descriptors 3 and 4 there.
        wired = f'exec "$0" "$@" 3<&{asked} 4>&{answered}'
        started = subprocess.Popen(
            ["bash", "-c", wired, executable, *flags], pass_fds=(asked, answered), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(asked)
        os.close(answered)
        silent = threading.Timer(seconds, started.kill)  # then reading ends, and the test with it
        silent.start()
        try:
            yield Page(to_browser, from_browser)
        finally:
            silent.cancel()
            started.kill()
            started.wait()
            os.close(to_browser)
            os.close(from_browser)

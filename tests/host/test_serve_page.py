"""The page of `kerngen serve`: read as it is, and used in a browser that talks to a server of the tiny checkpoint."""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from browser import MISSING, Page, browsing, find_browser
from command import ROOT
from pages import read_page
from served import Served, served

from kerngen.runtime.serve.chat_page import chat_page

MOST_BYTES = 48 * 1024
LEAST_CONTRAST = 4.5  # WCAG 2.2, AA, of text in normal size
KEY = "sesame"

# The page's fetch, watched, and played where a test puts what it should answer into `plays`:
# {status, body}, {pieces: [text], pause: ms between them}, or {more: fields of the request, which the server answers}.
PLAYED = """
window.asked = []; window.plays = [];
const fetched = window.fetch;
window.fetch = async (path, options) => {
  if (!path.endsWith("completions")) return fetched(path, options);
  asked.push(JSON.parse(options.body));
  const play = plays.shift();
  if (!play) return fetched(path, options);
  if (play.more) return fetched(path, {...options, body: JSON.stringify({...asked.at(-1), ...play.more})});
  if (play.status) return new Response(play.body, {status: play.status});
  const encoder = new TextEncoder();
  return new Response(new ReadableStream({async start(to) {
    options.signal.addEventListener("abort", () => to.error(options.signal.reason));
    for (const piece of play.pieces) {
      to.enqueue(encoder.encode(piece));
      if (play.pause) await new Promise((done) => setTimeout(done, play.pause));
    }
    to.close();
  }}));
};
"""

MARKDOWN = """# One *two*

Text with **bold**, _it_, `a*b*c`, ~~old~~ and snake_case_name, 2 * 3 * 4; see [here](https://example.org/a_(b) "t").
A second line of https://example.org/x.

1. first
2. second
   - inner `code`
     1. deep

   after a gap
3. third
- other

```cpp
if (a < b) { *p = 1; }

**not bold**
```

| a | b |
|---|--:|
| 1 \\| 2 | **3** |

> quoted
> > twice

---
***both***
"""

HOSTILE = """<img src=x onerror="window.owned=1"><script>window.owned=1</script>
[a](javascript:window.owned=1) [b](data:text/html,x) [c]( JaVaScRiPt:alert(1)) ![d](https://example.org/p.png)
[e](https://example.org/"onmouseover="window.owned=1) [f](//example.org) <https://example.org/auto>

```"><img src=x onerror=window.owned=1>
<svg onload=window.owned=1>
```
| <b>x</b> | [y](vbscript:z) |
|---|---|
| <iframe src=javascript:window.owned=1> | `<i>` |
"""


def _stream(*deltas: dict[str, Any], reason: str = "stop", usage: dict[str, Any] | None = None) -> list[str]:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    chunks.append({"choices": [], "usage": usage or {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}})
    return [*(f"data: {json.dumps(c)}\n\n" for c in chunks), "data: [DONE]\n\n"]


def _said(text: str) -> dict[str, Any]:
    return {"pieces": _stream({"content": text})}


@dataclass
class Chat:
    """The page in a browser."""

    page: Page
    server: Served

    def open(self, *, key: str | None = KEY, kept: list[dict[str, Any]] | None = None, **size: Any) -> None:
        """Nothing is stored but the key, and the conversation `kept`."""
        self.page.open(f"{self.server.url}/version")
        self.page.ask("localStorage.clear(); sessionStorage.clear()")
        if key:
            self.page.ask(f"sessionStorage.setItem('kerngen.key', {json.dumps(key)})")
        if kept:
            self.page.ask(f"localStorage.setItem('kerngen.conversation', {json.dumps(json.dumps(kept))})")
        self.again(**size)

    def again(self, **size: Any) -> None:
        self.page.open(f"{self.server.url}/", **size)
        self.page.errors.clear()  # of the address before, whose icon there is not
        self.page.requests.clear()

    def play(self, *plays: dict[str, Any]) -> None:
        self.page.ask(f"plays.push(...{json.dumps(plays)})")

    def send(self, text: str) -> None:
        self.page.ask("page.ask.focus()")
        self.page.type(text)
        self.page.press("Enter")

    def idle(self) -> None:
        self.page.until("running === null")

    def running(self, count: int) -> None:
        """Wait until so many requests are at work at the server."""
        end = time.monotonic() + 10
        while (found := self.server.metric("num_requests_running")) != count:
            assert time.monotonic() < end, found
            time.sleep(0.02)

    def replies(self) -> list[str]:
        found: list[str] = self.page.ask("[...document.querySelectorAll('.reply .body')].map((e) => e.innerText)")
        return found

    def click(self, text: str) -> None:
        """The last button with this text that is seen."""
        self.page.ask(f"""[...document.querySelectorAll("button")].filter((b) => b.textContent === {json.dumps(text)}
          && b.checkVisibility()).at(-1).click()""")


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    if (executable := find_browser()) is None:
        pytest.skip(MISSING)
    with browsing(executable, 240) as page:
        page.before(PLAYED)
        yield page


@pytest.fixture(scope="module")
def server(browser: Page) -> Iterator[Served]:
    with served("--api-key", KEY, "--context", "2048") as server:
        yield server


@pytest.fixture
def chat(browser: Page, server: Served) -> Chat:
    chat = Chat(browser, server)
    chat.open()
    return chat


# -- without a browser


def test_it_is_one_small_file_that_asks_for_nothing() -> None:
    html, _ = chat_page()
    assert len(html.encode()) < MOST_BYTES
    root = read_page(html)
    for node in root.all(""):
        for name in ("src", "href", "action", "srcset", "data"):
            assert node.attributes.get(name, "data:").startswith("data:"), f"<{node.tag} {name}>"
        assert not [name for name in node.attributes if name.startswith("on") or name == "style"], node.tag
    assert not re.search(r"@import|url\(", root.one("style").text)
    script = root.one("script").text
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|importScripts|DOMParser"
    assert re.findall(unsafe, script) == []
    assert re.findall(r"https?://[\w.]", script) == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "**/*.html" in settings["tool"]["setuptools"]["package-data"]["*"]


def test_everything_in_it_has_a_name() -> None:
    root = read_page(chat_page()[0])
    ids = [n.attributes["id"] for n in root.all("") if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    for button in root.all("button"):
        assert button.text.strip() or button.attributes.get("aria-label"), button.attributes
    labelled = {label.attributes.get("for") for label in root.all("label")}
    within = [f for label in root.all("label") for f in label.all("")]
    for field in (*root.all("input"), *root.all("textarea")):
        assert field.attributes.get("id") in labelled or field in within, field.attributes


def test_its_policy_allows_its_own_script_alone() -> None:
    policy = dict(part.strip().partition(" ")[::2] for part in chat_page()[1]["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["style-src"])
    assert "unsafe" not in str(policy)


# -- with the server


def test_a_server_of_text_alone_takes_no_image(chat: Chat) -> None:
    page = chat.page
    page.until("model")
    assert not page.ask("page.attach.checkVisibility()")
    assert page.ask("""(() => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File(["x"], "a.png", {type: "image/png"}));
      const event = new DragEvent("drop", {bubbles: true, cancelable: true, dataTransfer});
      page.ask.dispatchEvent(event);
      return event.defaultPrevented;
    })()"""), "the browser does not leave the page for the file"
    page.until("!page.note.hidden && page.told.textContent.includes('This server reads no images.')")
    assert page.ask("added.length") == 0


def test_an_answer_comes_and_is_kept(chat: Chat) -> None:
    page = chat.page
    page.until("page.model.textContent === 'gemma-4-tiny-w4a16'")
    page.ask("settings.temperature = '0'")
    chat.play({"more": {"ignore_eos": True, "max_tokens": 150}})  # so long that it comes in more than one piece
    page.ask("page.ask.focus()")
    page.type("Hello")
    page.press("Enter", shift=True)
    page.type("there")
    assert page.ask("[page.ask.value, messages.length]") == ["Hello\nthere", 0]
    page.press("Enter")
    chat.idle()
    (reply,) = chat.replies()
    assert reply
    assert page.ask("document.querySelector('.user .text').textContent") == "Hello\nthere"
    facts = page.ask("document.querySelector('.reply .tools span').textContent")
    assert re.match(r"\d+ tokens · [\d,.]+ tokens/s · first after \d+\.\d+ s", facts)
    assert re.fullmatch(r"\d+ of 2,048 tokens of context", page.ask("page.room.textContent"))
    spoken = page.ask("page.aloud.textContent")
    assert reply.split("\n")[0] in spoken
    assert page.ask("asked[0].stream_options.include_usage")
    assert page.errors == []
    assert {r.split("/", 3)[2] for r in page.requests if not r.startswith("data:")} == {chat.server.url.split("/")[2]}
    chat.again()
    assert chat.replies() == [reply]
    assert page.ask("document.querySelector('.reply .tools span').textContent") == facts
    assert not page.ask("JSON.stringify(localStorage).includes('sesame')"), "a key goes with its tab"


def test_stopping_ends_the_request_at_the_server(chat: Chat) -> None:
    chat.play({"more": {"ignore_eos": True}})
    chat.send("Go on")
    chat.page.until("document.querySelector('.reply .body').innerText.length > 20")
    chat.running(1)
    assert chat.page.ask("page.stop.checkVisibility() && !page.send.checkVisibility()")
    chat.page.press("Escape")
    chat.idle()
    chat.running(0)
    (reply,) = chat.replies()
    assert chat.page.ask("document.querySelector('.reply .tools span').textContent").endswith("stopped")
    chat.again()
    assert chat.replies() == [reply]


def test_a_key_is_asked_for(chat: Chat) -> None:
    chat.open(key=None)
    page = chat.page
    page.until("page.keys.checkVisibility() && document.activeElement === page.key")
    chat.send("Hello")
    page.until("document.querySelector('.wrong')?.innerText.startsWith('The server asks for a key.')")
    for key, then in (("open", "page.told.innerText === 'The server does not take this key.'"),
                      (KEY, "!page.keys.checkVisibility()")):  # fmt: skip
        page.ask("page.key.focus()")
        page.type(key)
        page.press("Enter")
        page.until(then)
    chat.idle()
    assert chat.replies()[0], "it was tried again"
    assert not page.ask("document.querySelector('.wrong').checkVisibility()")
    assert page.ask("sessionStorage.getItem('kerngen.key')") == KEY


def test_the_server_refuses_in_words(chat: Chat) -> None:
    chat.send("word " * 3000)
    told = chat.page.until(
        "document.querySelector('.wrong p').checkVisibility() && document.querySelector('.wrong p').innerText"
    )
    assert told.startswith("The conversation has become too long: this model's maximum context length is 2048 tokens")


# -- with answers that are played


def test_markdown_is_shown(chat: Chat) -> None:
    chat.play({"pieces": _stream(*({"content": c} for c in MARKDOWN))})
    chat.send("Show")
    chat.idle()
    shown = chat.page.ask("""(() => {
      const body = document.querySelector(".reply .body");
      const all = (s) => [...body.querySelectorAll(s)].map((e) => e.innerText);
      return {blocks: [...body.children].map((e) => e.tagName).join(" "), em: all("em"), strong: all("strong"),
              del: all("del"), code: all(":not(pre) > code"), pre: all("pre"), lang: all("figcaption span"),
              cells: all("td"),
              links: [...body.querySelectorAll("a")].map((a) => [a.href, a.innerText, a.rel, a.target]),
              nested: all("ol > li > ul > li > ol > li"), start: body.querySelector("ol ol").start,
              quotes: all("blockquote blockquote")};
    })()""")
    secure = ["noopener noreferrer nofollow", "_blank"]
    assert shown == {
        "blocks": "H3 P OL UL FIGURE DIV BLOCKQUOTE HR P", "em": ["two", "it", "both"], "strong": ["bold", "3", "both"],
        "del": ["old"], "code": ["a*b*c", "code"], "pre": ["if (a < b) { *p = 1; }\n\n**not bold**"], "lang": ["cpp"],
        "cells": ["1 | 2", "3"], "nested": ["deep"], "start": 1, "quotes": ["twice"],
        "links": [["https://example.org/a_(b)", "here", *secure],
                  ["https://example.org/x", "https://example.org/x", *secure]],
    }  # fmt: skip
    same = chat.page.ask(f"""(() => {{
      const text = {json.dumps(MARKDOWN)}, into = document.createElement("div"), growing = new Growing(into);
      for (let i = 0; i <= text.length; i++) growing.show(text.slice(0, i));
      return [growing.kept > 5, into.innerHTML, document.querySelector(".reply .body").innerHTML];
    }})()""")
    assert same[0]
    assert same[1] == same[2], "what grew is what it is when it is read at once"


def test_what_a_model_says_is_no_markup(chat: Chat) -> None:
    chat.play({"pieces": _stream({"reasoning_content": HOSTILE}, *({"content": c} for c in HOSTILE))})
    chat.send(HOSTILE)
    chat.idle()
    chat.again()
    found = chat.page.ask("""(() => {
      const all = [...page.talk.querySelectorAll("*")];
      const bad = /IMG|SCRIPT|IFRAME|SVG|STYLE|OBJECT|^B$|^I$/i;
      return {owned: window.owned ?? null, images: document.images.length,
              tags: all.map((e) => e.tagName).filter((t) => bad.test(t)),
              handlers: all.flatMap((e) => e.getAttributeNames()).filter((n) => n.startsWith("on")),
              links: [...new Set([...page.talk.querySelectorAll("a")].map((a) => a.href))].sort()};
    })()""")
    assert found == {
        "owned": None, "images": 0, "tags": [], "handlers": [],
        "links": ["https://example.org/%22onmouseover=%22window.owned=1", "https://example.org/auto",
                  "https://example.org/p.png"],
    }  # fmt: skip
    assert "[a](javascript:window.owned=1)" in chat.replies()[0]
    assert not [r for r in chat.page.requests if "example.org" in r]
    assert chat.page.errors == []


@pytest.mark.parametrize(
    "piece",
    ["*a ", "**a* ", "*a", "[", "[a](", "`", "``a`", "> ", "- ", "1. ", "|a", "~~", "<br>", "https://a(", "_a_",
     "*a | b* ", "[a | ](https://b)", "**a _b | c_ d**", "***a | b***", "( | )"],
)  # fmt: skip
def test_hostile_markdown_is_quick_and_shallow(chat: Chat, piece: str) -> None:
    """Many of it, or many that open and then as many that close."""
    ms, depth = chat.page.ask(f"""(() => {{
      const text = {json.dumps(piece.split(" | "))}.map((part) => part.repeat(20000)).join("");
      const began = performance.now(), made = nodes([text, text]);
      let deepest = 0;
      const walk = document.createTreeWalker(made[0]);
      for (let node = walk.currentNode; node; node = walk.nextNode()) {{
        let depth = 0;
        if (!node.firstChild) for (let e = node; e && depth < 999; e = e.parentNode) depth++;
        deepest = Math.max(deepest, depth);
      }}
      return [performance.now() - began, deepest];
    }})()""")
    assert ms < 10_000, "were it the square of what there is, it would be minutes, on any machine"
    assert depth < 200


def test_what_is_sent(chat: Chat) -> None:
    page = chat.page
    page.until("model")
    chat.click("Settings")
    for name, value in {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "40",
                        "max_tokens": "99", "seed": "7"}.items():  # fmt: skip
        page.ask(f"page.fields.elements.{name}.focus()")
        page.type(value)
    page.press("Escape")
    assert not page.ask("page.settings.open")
    chat.click("Think")
    chat.play(_said("Yes."), _said("No."))
    chat.send("A?")
    chat.idle()
    first = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A?"}], "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "model": "gemma-4-tiny-w4a16",
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 99, "seed": 7,
        "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    assert page.ask("asked") == [first]
    chat.again()  # settings are kept as well
    chat.click("Settings")
    chat.click("Back to the server's defaults")
    page.ask("page.fields.elements.system.value = ''; keep(); page.settings.close()")
    chat.click("Think")
    chat.play(_said("No."))
    chat.send("B?")
    chat.idle()
    (second,) = page.ask("asked")
    said = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "B?"},
    ]
    assert second["messages"] == said
    assert set(second) <= {"messages", "stream", "stream_options", "model"}
    page.ask("page.fields.elements.temperature.value = '101'; keep()")
    chat.send("C?")
    assert page.ask("[page.settings.open, asked.length, messages.length, page.ask.value]") == [True, 1, 4, "C?"]


def test_thoughts_and_accepted_drafts(chat: Chat) -> None:
    details = {"accepted_prediction_tokens": 18, "rejected_prediction_tokens": 6}
    usage: dict[str, Any] = {"completion_tokens": 31, "total_tokens": 40, "completion_tokens_details": details}
    deltas = [{"reasoning_content": "I *wonder*."}, {"reasoning_content": " Well."}, {"content": "Four."}]
    chat.play({"pieces": _stream(*deltas, usage=usage), "pause": 50})
    chat.send("2 + 2?")
    chat.page.until("document.querySelector('.thoughts summary')?.innerText === 'Thinking…'")
    chat.idle()
    assert chat.page.ask("document.querySelector('.thoughts').open") is False
    assert chat.page.ask("document.querySelector('.thoughts summary').innerText").startswith("Thought for 0.")
    assert chat.page.ask("document.querySelector('.thoughts em').textContent") == "wonder"
    facts = chat.page.ask("document.querySelector('.tools span:not(:empty)').textContent")
    assert facts.startswith("31 tokens")
    assert facts.endswith("18 of 24 drafts accepted")
    usage["completion_tokens_details"] = dict.fromkeys(details, 0)
    chat.play({"pieces": _stream({"content": "Five."}, usage=usage)})
    chat.send("2 + 3?")
    chat.idle()
    assert "drafts" not in chat.page.ask("[...document.querySelectorAll('.reply .tools')].at(-1).textContent")
    assert "wonder" not in json.dumps(chat.page.ask("asked[1]")), "thoughts are not part of what follows"


def test_again_changed_cleared_and_back(chat: Chat) -> None:
    page = chat.page
    chat.play(*map(_said, ("One.", "Two.", "Second.", "Three.")))
    chat.send("First?")
    chat.idle()
    chat.click("Regenerate")
    chat.idle()
    assert chat.replies() == ["Two."]
    chat.send("Second?")
    chat.idle()
    page.ask("document.querySelector('.edit').click()")
    page.ask("document.activeElement.select()")
    page.type("Third?")
    page.press("Enter")
    chat.idle()
    assert chat.replies() == ["Three."]
    assert page.ask("asked[3].messages") == [{"role": "user", "content": "Third?"}]
    chat.click("Undo")
    assert chat.replies() == ["Two.", "Second."]
    chat.click("Clear")
    assert chat.replies() == []
    assert page.ask("page.empty.checkVisibility() && !page.clear.checkVisibility()")
    assert page.ask("localStorage.getItem('kerngen.conversation')") == "[]"
    chat.click("Undo")
    chat.again()
    assert chat.replies() == ["Two.", "Second."]


@pytest.mark.parametrize(("play", "told", "left"), [
    ({"status": 429, "body": json.dumps({"error": {"message": "3 requests wait"}})},
     "The server has too much to do now: 3 requests wait.", ""),
    ({"status": 502, "body": "<h1>Bad gateway</h1>"}, "The server refuses this: 502 .", ""),
    ({"pieces": _stream({"content": "Half"})[:1]}, "The connection ended before the answer was complete.", "Half"),
    ({"pieces": [*_stream({"content": "Half"})[:1], 'data: {"error":{"message":"the engine has ended"}}\n\n']},
     "The server gave up: the engine has ended.", "Half"),
], ids=["busy", "gateway", "cut off", "gave up"])  # fmt: skip
def test_an_error_is_told_and_tried_again(chat: Chat, play: dict[str, Any], told: str, left: str) -> None:
    chat.play(play, _said("Whole."))
    chat.send("Well?")
    chat.idle()
    assert chat.page.ask("document.querySelector('.wrong p').innerText") == told
    assert chat.replies() == [left]
    chat.click("Try again")
    chat.idle()
    assert chat.replies() == ["Whole."]
    assert chat.page.ask("[messages.length, document.querySelector('.wrong').checkVisibility()]") == [2, False]


def test_roles_alternate_where_an_answer_never_came(chat: Chat) -> None:
    chat.play({"status": 500, "body": "{}"}, _said("Yes."))
    for text in ("One?", "Two?"):
        chat.send(text)
        chat.idle()
    assert chat.page.ask("asked[1].messages") == [{"role": "user", "content": "One?\n\nTwo?"}]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 900), (390, 844), (320, 640)], ids=["desk", "phone", "small phone"])
def test_it_can_be_read(chat: Chat, size: tuple[int, int], dark: bool) -> None:
    wide = (
        "| " + " | ".join(["a wide table's cell"] * 9) + " |\n" + "|---" * 9 + "|\n\n```\n" + "long " * 60 + "\n```\n"
    )
    kept = [
        {"role": "user", "content": "Show " + "all" * 60},
        {"role": "assistant", "content": MARKDOWN + wide, "reasoning": "Hm."},
        {"role": "user", "content": "And?"}, {"role": "assistant", "content": "", "error": "The connection broke."},
    ]  # fmt: skip
    chat.open(kept=kept, width=size[0], height=size[1], dark=dark)
    page = chat.page
    page.ask("document.querySelector('details').open = isFollowing = true; follow()")
    page.ask("note('It was cleared, ' + 'all'.repeat(99), () => 0); page.keys.hidden = false")
    page.until("scroller.scrollTop + scroller.clientHeight >= scroller.scrollHeight - 1")
    for where in ("document.documentElement", "document.body", "page.scroller"):
        assert page.ask(f"{where}.scrollWidth <= {where}.clientWidth"), f"{where} scrolls aside"
    assert page.ask("document.documentElement.scrollHeight <= innerHeight"), "only the conversation scrolls"
    texts = "h1, h2, h3, p, a, label, small, summary, th, td, li, code, button, span, .text"
    for scene in ("0", "page.settings.showModal()"):
        page.ask(scene)
        ratio, place = page.contrast(texts)
        assert ratio >= LEAST_CONTRAST, place
    assert page.ask("page.settings.scrollWidth <= page.settings.clientWidth")
    assert page.errors == []

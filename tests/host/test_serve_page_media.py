"""Images and sound on the page of `kerngen serve`: added, removed, refused, sent, kept. But for one test, answers are
played.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser import MISSING, browsing, find_browser
from command import ROOT
from seeing import seeing
from served import served
from test_serve_page import KEY, PLAYED, Chat, _said

TINY = ROOT / "examples" / "tiny"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # 1 x 1
TAKES = {"image": True, "audio": True, "max_image_bytes": 1000, "max_audio_bytes": 2000,
         "max_video_bytes": 3000, "max_items": 3, "max_body_bytes": 100_000}  # fmt: skip
# file(name, type, bytes of base64 or a number of them) and give(event, ...files), which drops or pastes them.
HELPERS = (
    f"const PNG = {json.dumps(PNG)};"
    + """
window.file = (name, type, of) => new File([typeof of === "number" ? new Uint8Array(of) :
  Uint8Array.from(atob(of), (c) => c.charCodeAt(0))], name, {type});
window.carried = (files) => { const d = new DataTransfer(); files.forEach((f) => d.items.add(f)); return d; };
window.give = (kind, ...files) => {
  const data = carried(files), options = {bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data};
  const event = kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
  page.ask.dispatchEvent(event);
  return event.defaultPrevented;
};
window.png = (name = "a.png") => file(name, "image/png", PNG);
"""
)


@pytest.fixture(scope="module")
def seen() -> Iterator[Chat]:
    if (executable := find_browser()) is None:
        pytest.skip(MISSING)
    options, model = ("--api-key", KEY, "--media", "images,audio"), str(TINY / "gemma-4-tiny-unified")
    with browsing(executable, 240) as page, served(*options, model=model) as server:
        page.before(PLAYED)
        page.before(HELPERS)
        yield Chat(page, server)


@pytest.fixture
def chat(seen: Chat) -> Chat:
    seen.open()
    met(seen)
    return seen


def met(chat: Chat, **changes: Any) -> None:
    """As if the server had these limits."""
    chat.page.until("takes")
    chat.page.ask(f"takes = {json.dumps(TAKES | changes)}")


def names(chat: Chat) -> list[str]:
    found: list[str] = chat.page.ask("added.map((m) => m.name)")
    return found


def told(chat: Chat, part: str) -> None:
    chat.page.until(f"!page.note.hidden && page.told.textContent.includes({json.dumps(part)})")
    chat.page.ask("shut()")


def test_what_is_shown_and_played_is_named(seen: Chat) -> None:
    seen.open()
    page = seen.page
    page.until("takes && page.attach.checkVisibility()")
    for name, kind, question in (
        ("cross.png", "image/png", "What is this?"),
        ("tone.wav", "audio/wav", "What do you hear?"),
    ):
        data = base64.b64encode((TINY / name).read_bytes()).decode()
        page.ask(f"give('drop', file('{name}', '{kind}', {json.dumps(data)}))")
        page.until("added.length === 1")
        seen.send(question)
        seen.idle()
    assert seen.replies() == ["A green cross.", "A low tone."]
    assert page.errors == []


def test_the_server_says_what_it_reads() -> None:
    with seeing(options="images") as service:
        (model,) = (m for m in service.client.get("/v1/models").json()["data"] if m["id"] == "tiny")
        assert set(model["media"]) == set(TAKES)
        assert (model["media"]["image"], model["media"]["audio"]) == (True, False)
    with seeing(options="none") as service:
        assert "media" not in service.client.get("/v1/models").json()["data"][0]


def test_images_come_by_drop_paste_and_file_and_go_again(chat: Chat) -> None:
    page = chat.page
    assert page.ask("give('dragover', png())")
    assert page.ask("document.body.classList.contains('drop')")
    assert page.ask("give('drop', png('a.png'))")
    page.until("added.length === 1")
    assert not page.ask("document.body.classList.contains('drop')")
    assert page.ask("give('paste', png('b.png'))")
    page.until("added.length === 2")
    page.ask("page.files.files = carried([file('c.wav', 'audio/wav', 'UklGRg==')]).files; page.files.onchange()")
    page.until("added.length === 3")
    assert names(chat) == ["a.png", "b.png", "c.wav"]
    assert page.ask("page.files.value") == "", "the same file may come again"
    page.until("[...document.images].length === 2 && [...document.images].every((i) => i.naturalWidth === 1)")
    assert page.ask("[...page.added.querySelectorAll('button')].map((b) => b.getAttribute('aria-label'))") == [
        "Remove a.png", "Remove b.png", "Remove c.wav",
    ]  # fmt: skip
    page.ask("page.added.querySelectorAll('button')[1].click()")
    assert names(chat) == ["a.png", "c.wav"]
    assert not page.ask("page.send.disabled"), "an image may be sent without words"
    page.ask("page.added.querySelector('button').click(); page.added.querySelector('button').click()")
    assert page.ask("[page.added.hidden, page.send.disabled]") == [True, True]
    assert page.errors == []


def test_they_are_sent_before_the_words_and_kept(chat: Chat) -> None:
    page = chat.page
    chat.play(_said("A dot."), _said("Red."), _said("Blue."))
    page.ask("give('drop', png(), file('b.MP3', 'audio/mpeg', 'SUQz'))")
    page.until("added.length === 2")
    chat.send("What is this?")
    chat.idle()
    assert page.ask("[added.length, page.added.hidden]") == [0, True]
    first = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "input_audio", "input_audio": {"data": "SUQz", "format": "mp3"}},
        {"type": "text", "text": "What is this?"},
    ]
    assert page.ask("asked[0].messages") == [{"role": "user", "content": first}]
    page.until("document.querySelector('.user img')?.naturalWidth === 1")
    assert page.ask("document.querySelector('.user figcaption').textContent") == "b.MP3"
    chat.again()
    met(chat)
    page.until("document.querySelector('.user img')?.naturalWidth === 1")
    chat.play(_said("Red."), _said("Blue."))
    chat.send("Which colour?")
    chat.idle()
    assert page.ask("asked[0].messages") == [
        {"role": "user", "content": first}, {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": "Which colour?"},
    ]  # fmt: skip
    page.ask("document.querySelector('.user .edit').click()")
    page.until("document.querySelector('.user textarea') !== null")
    page.ask("document.querySelector('.user textarea').focus()")
    page.type(" Say!")
    page.press("Enter")
    chat.idle()
    assert page.ask("asked[1].messages[0].content.slice(0, 2)") == first[:2], "who changes the words keeps the image"
    assert "Say!" in page.ask("asked[1].messages[0].content[2].text")
    assert page.errors == []


def test_an_image_without_words_is_a_message(chat: Chat) -> None:
    chat.play(_said("A dot."))
    chat.page.ask("give('paste', png())")
    chat.page.until("added.length === 1 && !page.send.disabled")
    chat.page.ask("page.ask.focus()")
    chat.page.press("Enter")
    chat.idle()
    assert chat.page.ask("asked[0].messages[0].content.map((p) => p.type)") == ["image_url"]
    assert not chat.page.ask("document.querySelector('.user .text').checkVisibility()")


@pytest.mark.parametrize(("file", "says"), [
    ("file('big.png', 'image/png', 1001)", "big.png has 0.0 MB; the server takes 0.0 MB."),
    ("file('long.wav', 'audio/wav', 2001)", "long.wav has"),
    ("file('a.svg', 'image/svg+xml', 10)", "a.svg is no PNG, JPEG, WebP or GIF."),
    ("file('a.txt', 'text/plain', 10)", "a.txt is neither an image nor sound."),
])  # fmt: skip
def test_what_the_server_would_refuse_is_told_before_it_is_sent(chat: Chat, file: str, says: str) -> None:
    chat.page.ask(f"give('drop', {file})")
    told(chat, says)
    assert names(chat) == []


def test_a_conversation_has_room_for_so_many(chat: Chat) -> None:
    chat.page.ask("give('drop', png('1'), png('2'), png('3'), png('4'))")
    told(chat, "The server takes 3 images and sounds in a conversation.")
    assert names(chat) == ["1", "2", "3"]
    met(chat, max_body_bytes=400, max_items=9)
    chat.page.ask("give('drop', png('5'))")
    told(chat, "With 5 the conversation has more than")
    met(chat, audio=False, max_items=9)
    chat.page.ask("give('drop', file('a.wav', 'audio/wav', 10))")
    told(chat, "This server reads no sound.")


def test_what_a_browser_cannot_keep_is_said_and_no_longer_sent(chat: Chat) -> None:
    page = chat.page
    page.ask(f"added = [{{kind: 'image', name: 'huge.png', url: 'data:image/png;base64,{PNG}' + ' '.repeat(6e6)}}]")
    chat.play(_said("So."))
    chat.send("What is this?")
    chat.idle()
    told(chat, "once the page is closed, the model no longer sees them")
    assert page.ask("asked[0].messages[0].content.length") == 2
    chat.again()
    met(chat)
    assert page.ask("document.querySelector('.user .lost').innerText").startswith("huge.png: not kept")
    chat.play(_said("So."))
    chat.send("And?")
    chat.idle()
    assert page.ask("asked[0].messages[0].content") == "What is this?"


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_and_is_not_wider_than_a_phone(chat: Chat, dark: bool) -> None:
    chat.again(width=360, height=640, dark=dark)
    met(chat)
    chat.page.ask("give('drop', png('a-long-name-of-a-file.png'), file('voice-of-somebody.wav', 'audio/wav', 9))")
    chat.page.until("added.length === 2")
    assert chat.page.ask("document.documentElement.scrollWidth") <= 360
    ratio, where = chat.page.contrast("#added figcaption, #added button")
    assert ratio >= 4.5, where

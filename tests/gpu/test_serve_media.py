"""`kerngen serve --media images,audio` on a GPU, with random weights in the shapes of E2B."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
from serving import serving

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'kerngen[media]'")
SERVE = ("gemma-4-e2b", "--generated", "--no-draft", "--media", "images,audio", "--context", "4096", "--max-batch", "4")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(*SERVE) as (_, found):
        yield found


def _image(seed: int, **detail: str) -> dict[str, Any]:
    into = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (480, 640, 3), np.uint8)
    image.fromarray(pixels).save(into, "PNG")
    url = "data:image/png;base64," + base64.b64encode(into.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url, **detail}}


def _sound(seed: int) -> dict[str, Any]:
    into = io.BytesIO()
    with wave.open(into, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.random.default_rng(seed).integers(-9000, 9000, 16_000, np.int16).tobytes())
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(into.getvalue()).decode(), "format": "wav"}}


def _asked(url: str, *parts: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Log-probabilities of the answer's tokens, and what it used."""
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "bada fo gi"}]}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": True, "ignore_eos": True}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return [found["logprob"] for found in told["choices"][0]["logprobs"]["content"]], told["usage"]


def test_soft_tokens_are_counted_by_their_budget(url: str) -> None:
    _, text = _asked(url)
    for detail, soft in (("low", 63), ("auto", 266), ("high", 1064)):  # of 640 x 480 pixels
        _, used = _asked(url, _image(1, detail=detail))
        assert used["prompt_tokens"] == text["prompt_tokens"] + soft + 2
    _, used = _asked(url, _sound(1))
    assert used["prompt_tokens"] == text["prompt_tokens"] + 25 + 2


def test_what_is_shown_and_played_matters(url: str) -> None:
    first, _ = _asked(url, _image(1), _sound(1))
    again, used = _asked(url, _image(1), _sound(1))
    assert used["prompt_tokens_details"]["cached_tokens"] > 0, "the same image and sound share their pages"
    assert again == pytest.approx(first, abs=0.2), "as far as 16 bits are the same behind a cached prefix"
    for other in ((_image(2), _sound(1)), (_image(1), _sound(2))):
        assert _asked(url, *other)[0] != first


def test_many_at_once_are_answered(url: str) -> None:
    alone = [_asked(url, _image(seed))[1] for seed in range(3, 9)]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda seed: _asked(url, _image(seed))[1], range(3, 9)))
    assert [used["prompt_tokens"] for used in together] == [used["prompt_tokens"] for used in alone]

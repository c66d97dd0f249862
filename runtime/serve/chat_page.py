"""The chat page, and the policy under which a browser shows it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files


@cache
def chat_page() -> tuple[str, Mapping[str, str]]:
    """Its HTML and its headers: it runs its own script and no other, asks this server alone, and makes no markup of
    text (https://www.w3.org/TR/CSP3/, https://www.w3.org/TR/trusted-types/).
    """
    html = (files("kerngen.runtime.serve") / "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash_of('script', html)}; style-src {_hash_of('style', html)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return html, {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
                  "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}  # fmt: skip


def _hash_of(tag: str, html: str) -> str:
    """The source expression that allows the page's one element of this kind."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

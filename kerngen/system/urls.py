"""URLs as they may be shown: what is printed, logged or written down never has a password."""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"
# Up to the last @, though one in a password should be %40, and though what follows it may have one: rather too much.
_USER = re.compile(r"(?<=://)([^/?#:@]*):(.*)@", re.DOTALL)
_QUERY = re.compile(r"([?&][^=&]*passw[^=&]*=)([^&]*)", re.IGNORECASE)


def without_password(url: str) -> str:
    """`url` with *** for the passwords in it, of its user and in its query. A path is as it is."""
    if "://" not in url:
        return url
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1:{HIDDEN}@", url))


def hide_password(text: str, url: str) -> str:
    """`text`, what a driver says of `url`, without the passwords that are in that."""
    found = [m[2] for m in (*_USER.finditer(url), *_QUERY.finditer(url))] if "://" in url else []
    for secret in sorted({s for password in found for s in (password, unquote(password)) if s}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return without_password(text)

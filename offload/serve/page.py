"""The chat page: one file, no scripts or fonts from elsewhere, and headers that keep it so."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from fastapi.responses import HTMLResponse


@functools.cache
def _page() -> tuple[str, str]:
    """The page and its content security policy, which names the hashes of what is inline."""
    text = resources.files("offload.serve").joinpath("page.html").read_text(encoding="utf-8")
    script, style = (_hashes(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hashes(text: str, tag: str) -> str:
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
        for inside in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    )


def response() -> HTMLResponse:
    """The page. What a model writes is text in it, never markup; the policy holds even if not."""
    text, policy = _page()
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )

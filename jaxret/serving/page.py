"""The web page of a server. It is one file, which needs no other file and no other server."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from jaxret.serving.gateway import Endpoint
from jaxret.serving.refusal import Body


def page_endpoint() -> Endpoint:
    """Return the endpoint of the page, which is read once. Its content policy allows its own script and style, by their
    digests, and requests to this server."""
    text = files("jaxret.serving").joinpath("page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_digests('script', text)}",
            f"style-src {_digests('style', text)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )

    async def page(request: Request, body: Body) -> Response:
        return Response(text, media_type="text/html", headers={"content-security-policy": policy})

    return page


def _digests(tag: str, text: str) -> str:
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts)

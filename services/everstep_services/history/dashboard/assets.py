"""Scripts, styles and templates, read with the code; each file's URL names its content."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from everstep.verdict_causes import advice_text, retry_text
from everstep_services.history.dashboard import formats
from everstep_services.history.dashboard.ansi import log_text
from everstep_services.history.dashboard.pages.runbooks import of_cause
from everstep_services.history.dashboard.parts import guarded, part

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FOR_EVER = "public, max-age=31536000, immutable"


def _read(folder: str) -> dict[str, bytes]:
    """The files of a folder, as they are while this code is loaded: an upgrade changes them."""
    files = (resources.files(__package__) / folder).iterdir()
    return {file.name: file.read_bytes() for file in files if file.name[0] != "."}


_STATIC, _TEMPLATES = _read("static"), _read("templates")


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it goes over the wire."""

    media_type: str
    plain: bytes
    packed: bytes


class Assets:
    """All that the dashboard is made of. Making it packs and compiles: do it in a thread."""

    def __init__(self) -> None:
        self._files: dict[str, Asset] = {}
        self._urls: dict[str, str] = {}
        for name, plain in _STATIC.items():
            self._add(name, plain)
        self.environment = _environment(self.url)

    def url(self, name: str) -> str:
        """Where a file is served."""
        return self._urls[name]

    def answer(self, request: Request) -> Response:
        """The file that a URL names."""
        asset = self._files.get(request.path_params["name"])
        if asset is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        headers = {"Cache-Control": _FOR_EVER, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(asset.packed, 200, headers, asset.media_type)
        return Response(asset.plain, 200, headers, asset.media_type)

    def _add(self, file: str, plain: bytes) -> None:
        stem, _, suffix = file.rpartition(".")
        if suffix not in _TYPES:
            return
        name = f"{stem}.{hashlib.blake2b(plain, digest_size=6).hexdigest()}.{suffix}"
        self._files[name] = Asset(_TYPES[suffix], plain, gzip.compress(plain, 9, mtime=0))
        self._urls[file] = f"/static/{name}"


@cache
def shared_assets() -> Assets:
    """Those of all dashboards of a process."""
    return Assets()


def _environment(url: Any) -> Environment:
    texts = {name: guarded(text.decode()) for name, text in _TEMPLATES.items()}
    made = Environment(
        loader=DictLoader(texts),
        autoescape=lambda name: name is None or not name.endswith(".md"),  # noqa: S701  the rest
        undefined=StrictUndefined,
        finalize=formats.shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (
        "clip",
        "duration",
        "size",
        "number",
        "percent",
        "words",
        "judged",
        "ranks",
        "chip",
        "tone",
        "act",
        "gist",
        "clock_time",
        "day_time",
    ):
        made.filters[name] = getattr(formats, name)
    made.filters["log_text"] = log_text
    made.filters["advice_text"] = advice_text
    made.filters["retry_text"] = retry_text
    made.filters["runbook"] = of_cause
    made.globals["static"] = url
    made.globals["part"] = part
    for name in texts:
        made.get_template(name)  # compiled before anybody waits for it
    return made

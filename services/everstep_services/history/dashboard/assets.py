"""Scripts, styles and templates, read once; each file's URL names its content."""

import gzip
import hashlib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from everstep.verdict_causes import advice_text, retry_text
from everstep_services.history.dashboard import formats
from everstep_services.history.dashboard.ansi import log_text
from everstep_services.history.dashboard.pages.runbooks import of_cause

if TYPE_CHECKING:
    from jinja2 import Environment

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FOR_EVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it goes over the wire."""

    media_type: str
    plain: bytes
    packed: bytes


class Assets:
    """All that the dashboard is made of. Loading reads files: do it in a thread."""

    def __init__(self) -> None:
        here = resources.files("everstep_services.history.dashboard")
        self._files: dict[str, Asset] = {}
        self._urls: dict[str, str] = {}
        for file in here.joinpath("static").iterdir():
            self._add(file)
        self.environment = _environment(here.joinpath("templates"), self.url)

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

    def _add(self, file: Traversable) -> None:
        stem, _, suffix = file.name.rpartition(".")
        if suffix not in _TYPES:
            return
        plain = file.read_bytes()
        name = f"{stem}.{hashlib.blake2b(plain, digest_size=6).hexdigest()}.{suffix}"
        self._files[name] = Asset(_TYPES[suffix], plain, gzip.compress(plain, 9, mtime=0))
        self._urls[file.name] = f"/static/{name}"


def _environment(folder: Traversable, url: Any) -> "Environment":
    from jinja2 import DictLoader, Environment, StrictUndefined  # slow: when it is first needed

    from everstep_services.history.dashboard.parts import guarded, part

    files = (file for file in folder.iterdir() if file.name[0] != ".")
    texts = {file.name: guarded(file.read_text()) for file in files}
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

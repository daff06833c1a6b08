"""Images in the messages of a row: their references, and the bytes of those that are files.

A part `{"type": "image_url", "image_url": {"url": ...}}` has a data: URL, an http(s) URL, or a file, as a path relative
to the input file or a file:// URL. Files travel in the item's payload, as data: URLs.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject, short

IMAGE_MAX = 20 << 20
"""Maximum size of an image in bytes."""
ROW_MAX = 32 << 20
"""Maximum size of all image files of a row in bytes."""
PART = "image_url"
_DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_HTTP = ("http://", "https://")
_HEAD = 12
_KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp"}


def url_fault(url: Any) -> str:
    """Return what is wrong with the URL of an image, or ""."""
    if not isinstance(url, str) or not url:
        return "needs a url that is a string"
    if not is_data(url):
        return ""
    if not _DATA.match(url):
        return f"is no image in base64: write data:image/png;base64,..., not {short(url[:40])}"
    return "" if len(url) * 3 // 4 <= IMAGE_MAX + _HEAD * 4 else f"is larger than {IMAGE_MAX >> 20} MiB"


def is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def is_http(url: str) -> bool:
    return url.lower().startswith(_HTTP)


def image_urls(messages: Any) -> list[str]:
    """Return the URLs of all image parts, in order. Values that are not messages are skipped."""
    found: list[str] = []
    for part in _parts(messages):
        image = part.get(PART)
        url = cast(JsonObject, image).get("url") if isinstance(image, dict) else image
        if part.get("type") == PART and isinstance(url, str):
            found.append(url)
    return found


def with_images(messages: Iterable[JsonObject], data: Mapping[str, str]) -> list[JsonObject]:
    """Return the messages with image URLs replaced by the data: URLs that `data` has for them."""

    def replaced(part: Any) -> Any:
        (url,) = image_urls([{"content": [part]}]) or ("",)
        if url not in data:
            return part
        given: JsonObject = part[PART] if isinstance(part[PART], dict) else {}
        return {**part, PART: {**given, "url": data[url]}}

    def whole(message: JsonObject) -> JsonObject:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [replaced(part) for part in cast(list[Any], content)]}

    return [whole(message) for message in messages]


def check_image(url: str, file: str | None, *, http: bool) -> None:
    """Raise InputError if the image may not be fetched or is not an image file. `file` is the input file that names it,
    or None."""
    if is_http(url):
        if not http:
            raise InputError(
                f"the image {short(url)} is on a web server: set allow_http_images = true in section [input], so that "
                "workers fetch it"
            )
    elif is_data(url):
        _decoded(url)
    elif file is None:
        raise InputError(f"the image {short(url)} is a file, which a row of a queue cannot name: use a data: URL")
    else:
        path = path_of(url, file)
        try:
            if not path.is_file():
                raise InputError(f"the image {short(url)} is no file at {path}")
            size = path.stat().st_size
            with path.open("rb") as image:
                _refuse(url, image.read(_HEAD), size)
        except OSError as error:
            raise InputError(f"the image {short(url)} cannot be read: {error.strerror or error}") from None


def load_images(urls: Iterable[str], file: str) -> dict[str, str]:
    """Return data: URLs of the images that are files, by their references. Raises InputError."""
    found: dict[str, str] = {}
    total = 0
    for url in dict.fromkeys(urls):
        if is_data(url) or is_http(url):
            continue
        check_image(url, file, http=False)
        try:
            data = path_of(url, file).read_bytes()
        except OSError as error:
            raise InputError(f"the image {short(url)} cannot be read: {error.strerror or error}") from None
        total += len(data)
        if total > ROW_MAX:
            raise InputError(f"the images of the row are larger than {ROW_MAX >> 20} MiB together: {short(url)}")
        found[url] = data_url(data, url)
    return found


def digest_of(images: Mapping[str, str]) -> bytes:
    """Return a hash of 32 bytes over all images."""
    hasher = blake3()
    for data in images.values():
        hasher.update(blake3(data.encode()).digest())
    return hasher.digest()


def data_url(data: bytes, name: str) -> str:
    """Encode an image as data: URL. Raises InputError if it is too large or not an image."""
    kind = _refuse(name, data[:_HEAD], len(data))
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def path_of(url: str, file: str) -> Path:
    """Return the path of the image `url` named by the input file `file`. Raises InputError."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InputError(f"the image {short(url)} is on another host: write file:///path")
        return Path(unquote(parts.path))
    if "://" in url:
        raise InputError(f"the image {short(url)} is neither a file nor a data: or http(s) URL")
    if "://" in file and not Path(url).is_absolute():
        raise InputError(f"the image {short(url)} is relative to an object in a bucket: use a data: URL")
    return Path(file).parent / url


def _refuse(name: str, head: bytes, size: int) -> str:
    """Return the kind of the image, such as webp. Raises InputError if it is too large or not an image."""
    if size > IMAGE_MAX:
        raise InputError(f"the image {short(name)} is larger than {IMAGE_MAX >> 20} MiB")
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "webp"
    for magic, kind in _KINDS.items():
        if head.startswith(magic):
            return kind
    raise InputError(f"{short(name)} is no image: PNG, JPEG, WebP, GIF and BMP are taken")


def _decoded(url: str) -> None:
    try:
        data = base64.b64decode(url.partition(",")[2], validate=True)
    except ValueError:
        raise InputError(f"the image {short(url[:40])} is no base64") from None
    _refuse(f"the image {url[:40]}", data[:_HEAD], len(data))


def _parts(messages: Any) -> Iterable[JsonObject]:
    for message in cast(list[Any], messages) if isinstance(messages, list | tuple) else ():
        content = cast(JsonObject, message).get("content") if isinstance(message, dict) else None
        for part in cast(list[Any], content) if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield cast(JsonObject, part)

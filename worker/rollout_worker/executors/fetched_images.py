"""Fetches images from web servers for rows, if [input] allow_http_images permits it."""

from __future__ import annotations

from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rollout.model.errors import AttemptError, InputError
from rollout.workloads.infer.images import IMAGE_MAX, data_url

TIMEOUT_S = 30.0
_AGAIN = (408, 425, 429)


def fetched(url: str) -> str:
    """Return the image as a data: URL. Blocking. Raises AttemptError, retryable if the server may have it later."""
    try:
        with urlopen(Request(url, headers={"User-Agent": "rollout"}), timeout=TIMEOUT_S) as answer:
            data = answer.read(IMAGE_MAX + 1)
    except HTTPError as error:
        again = error.code >= 500 or error.code in _AGAIN
        message = f"the image {url} cannot be fetched: the server answers {error.code} {error.reason}"
        raise AttemptError(message, code="image_unreachable" if again else "bad_request", retry=again) from error
    except (OSError, HTTPException, ValueError) as error:
        message = f"the image {url} cannot be fetched: {error}"
        raise AttemptError(message, code="image_unreachable", retry=True) from error
    try:
        return data_url(data, url)
    except InputError as error:
        raise AttemptError(error.message, code="bad_request", retry=False) from error

"""Rules of `[cloud]` that concern several keys, and the providers' rules for names.

They check values before these become a model, so that all faults of a file are reported at once. Patterns are strings,
compiled when the first file with a `[cloud]` is read, because every command imports this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from rollout.config.locate import Place
from rollout.config.secret_names import VALUE, is_value, variable_fault
from rollout.config.wording import choices

Fault = tuple[Place, str]

OF = {"aws": ("s3", "sqs", "region"), "gcp": ("gcs", "pubsub", "project")}
"""Keys and sections of each provider."""
PREFIX_MAX = 512
"""Maximum length of a prefix in bytes; keys of both stores have 1,024 at most."""

_REGION = r"[a-z]{2,5}(-[a-z]+)+-\d{1,2}"
_SQS_HOST = r"https?://(?:sqs\.([a-z0-9-]+)|([a-z0-9-]+)\.queue)\.amazonaws\.com(?:\.cn)?(?::\d+)?(/.*)?"
_SQS_ANY_HOST = r"(?:(?:sqs|sqs-fips|queue)\.([a-z0-9-]+)\.(?:vpce\.)?|([a-z0-9-]+)\.queue\.)amazonaws\.com(?:\.cn)?$"
_SQS_PATH = r"/\d{12}/[A-Za-z0-9_-]{1,80}(\.fifo)?"
_ADDRESS = r"\d{1,3}(\.\d{1,3}){3}"
_SCOPED = r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|\d+"
_PUBSUB = r"[A-Za-z][A-Za-z0-9._~+%-]{2,254}"
_SECRETS = {
    "aws": r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[\w/+=.@-]+|[\w/+=.@-]{1,512}",
    "gcp": r"(projects/[^/]+/secrets/)?[\w-]{1,255}(/versions/(\d+|latest))?",
}
_NAMES = {
    "aws": "a secret's name (letters, digits and /_+=.@-) or its ARN",
    "gcp": "a secret's name (letters, digits, _ and -), NAME/versions/N or projects/P/secrets/NAME",
}


def faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return the faults of `values`, the table `[cloud]` in its short form. The model reports wrong types."""
    provider = values.get("provider", "")
    found = list(_provider(values, provider))
    for key in ("s3", "gcs"):
        found += _store(key, _section(values, key), values)
    found += _aws(values)
    found += _gcp(values)
    if isinstance(provider, str):
        found += _allowlist(values, provider)
    return found


def provider_fault(value: object) -> str:
    """Return the fault of `provider`, or an empty string."""
    if value in ("", *OF):
        return ""
    said = choices("'aws' or 'gcp'", value)
    if isinstance(value, str) and value.lower() in OF:
        said += f'; did you mean "{value.lower()}"?'
    return said.replace("must be", "write", 1)


# ---- one provider


def _provider(values: Mapping[str, Any], provider: object) -> Iterator[Fault]:
    if provider not in ("", *OF):
        return  # the model says so
    given = {key for key, value in values.items() if key != "provider" and value not in ("", {}, None)}
    if not provider:
        if given:
            meant = [name for name, keys in OF.items() if given & set(keys)]
            add = f'provider = "{meant[0]}"' if len(meant) == 1 else 'provider = "aws" or provider = "gcp"'
            yield ("cloud",), f"provider is missing: add {add} below [cloud]"
        if len([name for name, keys in OF.items() if given & set(keys)]) < 2:
            return
    for name, keys in OF.items():
        if name == provider:
            continue
        for key in keys:
            if key in values and values[key] not in ("", None):
                what = f"[cloud.{key}]" if isinstance(values[key], dict) else key
                other = (
                    f'but provider = "{provider}"' if provider else "and the other provider's sections are there too"
                )
                yield ("cloud", key), f'{what} is of provider = "{name}", {other}: a run has one provider'


# ---- buckets


def _store(key: str, section: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Fault]:
    bucket, prefix = section.get("bucket"), section.get("prefix")
    compatible = bool(section.get("endpoint_url") or values.get("endpoint_url"))
    if isinstance(bucket, str):
        if wrong := _empty(bucket) or bucket_fault(key, bucket, compatible=compatible):
            yield ("cloud", key, "bucket"), wrong
    elif bucket is None and prefix:
        yield ("cloud", key, "bucket"), "is missing, and there is a prefix: name the bucket that it is of"
    if isinstance(prefix, str) and (wrong := prefix_fault(prefix)):
        yield ("cloud", key, "prefix"), wrong


def _empty(bucket: str) -> str:
    return "" if bucket else "is empty: name the bucket; without this key objects live elsewhere ([objects] backend)"


def bucket_fault(key: str, name: str, *, compatible: bool = False) -> str:
    """Return the fault of a bucket's name, or an empty string.

    `compatible` says that the store is neither AWS's nor Google's, and its rules may be laxer. Sources:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html,
    https://cloud.google.com/storage/docs/buckets#naming.
    """
    shown = name[:80]
    if "://" in name:
        alone, _, rest = name.partition("://")[2].partition("/")
        return f'is a URL: write bucket = "{alone}"' + (f' and prefix = "{rest}"' if rest else "")
    if name.startswith("arn:"):
        return "is an ARN: write the bucket's name alone"
    if "/" in name:
        alone, _, rest = name.partition("/")
        return f'has a slash: write bucket = "{alone}"' + (f' and prefix = "{rest}"' if rest else "")
    if compatible:
        return "" if re.fullmatch(r"[\w.-]{3,255}", name, re.ASCII) else f'"{shown}" cannot be the name of a bucket'
    most = 222 if key == "gcs" and "." in name else 63
    if not 3 <= len(name) <= most:
        return f'"{shown}" has {len(name)} characters: a bucket\'s name has 3 to {most}'
    allowed = r"[a-z0-9._-]+" if key == "gcs" else r"[a-z0-9.-]+"
    if not re.fullmatch(allowed, name):
        under = ", _" if key == "gcs" else ""
        return f'"{shown}": a bucket\'s name has lower-case letters, digits, hyphens{under} and dots only'
    if not (name[0].isalnum() and name[-1].isalnum()):
        return f'"{shown}": a bucket\'s name begins and ends with a letter or a digit'
    if ".." in name or re.fullmatch(_ADDRESS, name):
        return f'"{shown}" cannot be a bucket\'s name: two dots in a row, or the form of an IP address'
    return _reserved(key, name)


_S3_BEGIN = ("xn--", "sthree-", "amzn-s3-demo-")
_S3_END = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")


def _reserved(key: str, name: str) -> str:
    if key == "gcs":
        kept = name.startswith("goog") or "google" in name
        return f'"{name}": names that begin with "goog" or hold "google" are Google\'s own' if kept else ""
    for part in (*(p for p in _S3_BEGIN if name.startswith(p)), *(p for p in _S3_END if name.endswith(p))):
        what = "is a directory bucket's: use a general purpose bucket" if part == "--x-s3" else "is reserved by S3"
        return f'"{name}": a name with "{part}" {what}'
    return ""


def prefix_fault(prefix: str) -> str:
    if "://" in prefix:
        return "is a URL: write what stands behind the bucket's name"
    if prefix.startswith("/"):
        return "begins with a slash: keys of a bucket do not"
    parts = prefix.removesuffix("/").split("/")
    if prefix and any(part in ("", ".", "..") for part in parts):
        return 'has an empty part, "." or ".." between slashes'
    if not prefix.isprintable() or "\\" in prefix:
        return "has characters that cannot be seen, or a backslash"
    if len(prefix.encode("utf-8", "surrogatepass")) > PREFIX_MAX:
        return f"is too long: at most {PREFIX_MAX} bytes"
    return ""


# ---- AWS


def region_fault(region: str) -> str:
    if re.fullmatch(_REGION, region):
        return ""
    if zone := re.fullmatch(rf"({_REGION})[a-z]", region):
        return f'"{region}" is an availability zone: the region is "{zone[1]}"'
    return f'"{region[:80]}" is no region of AWS: write one as "us-west-2"'


def region_of_queue(url: str) -> str:
    """Return the region that an SQS URL names, or an empty string."""
    host = urlsplit(url).hostname or ""
    if host == "queue.amazonaws.com":
        return "us-east-1"
    found = re.search(_SQS_ANY_HOST, host)
    return (found[1] or found[2]) if found else ""


def _aws(values: Mapping[str, Any]) -> Iterator[Fault]:
    region = values.get("region")
    region = region if isinstance(region, str) else ""
    s3, sqs = _section(values, "s3"), _section(values, "sqs")
    elsewhere = values.get("endpoint_url") or s3.get("endpoint_url") or sqs.get("endpoint_url")
    wrong = "" if elsewhere or not region else region_fault(region)
    if wrong:
        yield ("cloud", "region"), wrong
    for key in ("queue_url", "output_queue_url"):
        url = sqs.get(key)
        if isinstance(url, str) and url:
            for fault in _queue(url, "" if wrong else region):
                yield ("cloud", "sqs", key), fault
    if sqs.get("queue_url") and sqs.get("queue_url") == sqs.get("output_queue_url"):
        yield ("cloud", "sqs", "output_queue_url"), "is queue_url as well: results would come back as rows"


def _queue(url: str, region: str) -> Iterator[str]:
    if url.startswith("arn:"):
        yield "is an ARN: write the queue's URL, as https://sqs.us-west-2.amazonaws.com/123456789012/NAME"
        return
    found = re.fullmatch(_SQS_HOST, url)
    if found is None:
        return  # of an emulator
    own = region_of_queue(url)
    if region and own != region:
        yield f'is in region "{own}", but region = "{region}": use a queue of that region, or correct the other one'
    if not re.fullmatch(_SQS_PATH, found[3] or ""):
        yield "must end in the account's twelve digits and the queue's name, as /123456789012/rollout"


# ---- GCP


def _gcp(values: Mapping[str, Any]) -> Iterator[Fault]:
    project = values.get("project")
    if isinstance(project, str) and project and not re.fullmatch(_SCOPED, project):
        yield (
            ("cloud", "project"),
            f'"{project[:80]}" is no id of a project: 6 to 30 lower-case letters, digits, hyphens',
        )
    pubsub = _section(values, "pubsub")
    for key, kind in (("topic", "topics"), ("subscription", "subscriptions"), ("output_topic", "topics")):
        name = pubsub.get(key)
        if isinstance(name, str) and name and (wrong := _pubsub(name, kind)):
            yield ("cloud", "pubsub", key), wrong
    if pubsub.get("topic") and pubsub.get("topic") == pubsub.get("output_topic"):
        yield ("cloud", "pubsub", "output_topic"), "is topic as well: results would come back as rows"


def _pubsub(name: str, kind: str) -> str:
    alone = name
    if "/" in name:
        full = re.fullmatch(rf"projects/[^/]+/{kind}/([^/]+)", name)
        if full is None:
            return f"must be a name, or projects/PROJECT/{kind}/NAME"
        alone = full[1]
    if not re.fullmatch(_PUBSUB, alone) or alone.startswith("goog"):
        return f'"{alone[:80]}" cannot be a name: 3 to 255 of letters, digits and -._~+%, a letter first, not "goog"'
    return ""


# ---- secrets


def _allowlist(values: Mapping[str, Any], provider: str) -> Iterator[Fault]:
    allowlist = _section(values, "secrets").get("allowlist")
    pattern = _SECRETS.get(provider)
    if not isinstance(allowlist, list) or pattern is None:
        return
    names = cast("list[Any]", allowlist)
    for index, name in enumerate(names):
        place = ("cloud", "secrets", "allowlist", index)
        if isinstance(name, str) and is_value(name):
            yield place, VALUE
        elif isinstance(name, str) and not re.fullmatch(pattern, name.partition("#")[0], re.ASCII):
            yield place, f'"{name[:80]}" must be {_NAMES[provider]}'
        elif isinstance(name, str) and name in names[:index]:
            yield place, f'"{name}" is there twice'
        elif isinstance(name, str) and (wrong := variable_fault(name)):
            yield place, wrong


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}

"""Secrets of AWS Secrets Manager: the current version (AWSCURRENT), read with secretsmanager:GetSecretValue."""

from __future__ import annotations

import re

from rollout.cloud.aws import Aws
from rollout.config.cloud import CloudSection
from rollout.config.settings import SecretsSection
from rollout.model.errors import ConfigError, InputError, NotFoundError, UnavailableError
from rollout.secrets.cloud import CloudSecretStore

BUDGET_S = 15.0
"""Seconds for all attempts at one read; a process waits for its secrets before it starts."""
NAMING = "letters, digits and /_+=.@- , or the ARN of a secret; NAME#KEY for a key of a JSON object"
_NAME = r"[A-Za-z0-9/_+=.@-]{1,512}|arn:[a-z-]+:secretsmanager:[a-z0-9-]+:\d{12}:secret:[A-Za-z0-9/_+=.@-]+"


def open_store(section: SecretsSection, cloud: CloudSection) -> CloudSecretStore:
    """Return the store. Raises ConfigError if the list has an invalid name, or the SDK is missing (at the first
    read)."""
    aws = Aws(cloud)

    async def read(name: str) -> bytes:
        return await _read(aws, name)

    names = [*cloud.secrets.allowlist, *section.allow]
    return CloudSecretStore(read, aws.close, names, cloud.secrets.ttl_secs, accepts=_is_name, naming=NAMING)


def _is_name(name: str) -> bool:
    return re.fullmatch(_NAME, name) is not None


async def _read(aws: Aws, name: str) -> bytes:
    what = f"secret {name!r} of [cloud.secrets] allowlist cannot be read"
    try:
        answer = await aws.call("secretsmanager", "get_secret_value", what=what, budget_s=BUDGET_S, SecretId=name)
    except NotFoundError as error:
        raise UnavailableError(
            f"{error.message.rstrip('.')}; make it in this account and region, give it a value, or mend the name: "
            f"aws secretsmanager create-secret --name {name} --secret-string ...",
            failure="missing",
        ) from None
    except InputError as error:
        if "delet" in error.message:
            remedy = f"take it back, aws secretsmanager restore-secret --secret-id {name}, or mend the list"
            raise UnavailableError(f"{what}: it is to be deleted; {remedy}", failure="missing") from None
        if "decrypt" in error.message.lower():
            raise ConfigError(f"{error.message}; allow kms:Decrypt on the key that encrypts it") from None
        raise
    except ConfigError as error:
        if "KMS" in error.message:
            raise ConfigError(f"{error.message}; allow kms:Decrypt on the key that encrypts it, too") from None
        raise
    text: str | None = answer.get("SecretString")
    if text is not None:
        return text.encode()
    binary: bytes = answer.get("SecretBinary") or b""
    return binary

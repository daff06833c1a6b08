"""AWS Secrets Manager, as far as moto has it; what it refuses is answered by a small server."""

from __future__ import annotations

import json

import pytest
from metadata_server import Answer, Served, serving
from moto_locked import AwsEmulator
from rollout.config.cloud import CloudSection
from rollout.config.secret_names import variable_of
from rollout.config.settings import SecretsSection
from rollout.model.errors import ConfigError, UnavailableError
from rollout.secrets import SecretStore, open_secrets


def store_of(aws: AwsEmulator, *names: str) -> SecretStore:
    return open_secrets(SecretsSection(), aws.cloud(secrets={"allowlist": list(names)}))


async def test_by_name_by_arn_and_by_key(aws: AwsEmulator) -> None:
    name, login = aws.fresh("rollout/token"), aws.fresh("rollout/login")
    aws.secret(name, "sesame-one")
    arn = aws.secret(login, '{"user": "anne"}')
    store = store_of(aws, name, f"{arn}#user")
    assert await store.get(name) == "sesame-one"
    assert await store.get(f"{arn}#user") == "anne"
    assert list(store.allowed) == [variable_of(name), variable_of(f"{login}#user")]
    await store.close()


async def test_missing_deleted_and_without_a_value(aws: AwsEmulator) -> None:
    gone = aws.fresh("gone")
    aws.secret(gone, "sesame-one")
    aws.client("secretsmanager").delete_secret(SecretId=gone)
    store = store_of(aws, "never-made", gone)
    with pytest.raises(UnavailableError, match=r"'never-made'.*create-secret --name never-made"):
        await store.get("never-made")
    with pytest.raises(UnavailableError, match=f"{gone}.*restore-secret --secret-id {gone}"):
        await store.get(gone)
    await store.close()


async def test_a_binary_secret_must_be_text(aws: AwsEmulator) -> None:
    for name, value in (("text-as-bytes", b"sesame-one"), ("bytes", b"\xff\x00")):
        aws.client("secretsmanager").create_secret(Name=name, SecretBinary=value)
    store = store_of(aws, "text-as-bytes", "bytes")
    assert await store.get("text-as-bytes") == "sesame-one"
    with pytest.raises(ConfigError, match=r"'bytes'.*is binary"):
        await store.get("bytes")
    await store.close()


class Refuses(Served):
    code = "AccessDeniedException"
    message = "User: anne is not authorized"

    async def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        body = json.dumps({"__type": self.code, "Message": self.message})
        return 400, {"Content-Type": "application/x-amz-json-1.1", "Connection": "close"}, body


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        (
            "AccessDeniedException",
            "not authorized",
            r"allow secretsmanager:GetSecretValue .*\[cloud.secrets\] allowlist",
        ),
        ("AccessDeniedException", "Access to KMS is not allowed", "allow kms:Decrypt"),
        ("DecryptionFailure", "can't decrypt the protected secret text", "allow kms:Decrypt"),
    ],
)
async def test_what_is_forbidden_names_permission_and_key(
    aws: AwsEmulator, code: str, message: str, remedy: str
) -> None:
    served = Refuses()
    served.code, served.message = code, message
    async with serving(served):
        section = {"provider": "aws", "endpoint_url": served.address, "secrets": {"allowlist": ["token"]}}
        store = open_secrets(SecretsSection(), CloudSection.model_validate(section))
        with pytest.raises(ConfigError, match=f"'token'.*{remedy}"):
            await store.get("token")
        await store.close()

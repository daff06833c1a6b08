"""Checks of an AWS account."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rollout.cloud.aws import Aws
from rollout.cloud.aws_errors import rows
from rollout.cloud.bucket import Bucket
from rollout.cloud.s3_bucket import S3Bucket
from rollout.config.cloud import CloudSection
from rollout.config.cloud_rules import region_of_queue
from rollout.model.errors import ConfigError, NotFoundError, RolloutError, UnavailableError

PART = 16 << 20
"""Part size of the large object, in bytes; it is uploaded in parts whatever the configuration says."""
BUDGET_S = 5.0
DAYS = 7


class AwsAccount:
    store, queue, secrets, compute = "s3", "sqs", "secretsmanager", "ec2"

    def __init__(self, cloud: CloudSection) -> None:
        self._cloud = cloud
        self._aws = Aws(cloud)

    def endpoints(self, wanted: set[str]) -> dict[str, str]:
        return {service: self._endpoint(service) for service in sorted(wanted) or ["sts"]}

    def _endpoint(self, service: str) -> str:
        url = self._cloud.sqs.queue_url
        if service == "sqs" and url and not self._aws.endpoint("sqs") and region_of_queue(url):
            return url
        region = self._aws.region(service)
        end = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        return self._aws.endpoint(service) or f"https://{service}.{region}.{end}"

    def _by_store(self, wanted: set[str]) -> bool:
        """Return whether the store alone is checked; a compatible store has no STS to ask."""
        return "s3" in wanted and bool(self._aws.endpoint("s3")) and not self._aws.endpoint("sts")

    async def authenticate(self, wanted: set[str]) -> str:
        if not self._by_store(wanted):
            try:
                answer = await self._aws.call("sts", "get_caller_identity", what="no identity", budget_s=BUDGET_S)
                return str(answer.get("Arn", ""))
            except UnavailableError:  # a private network may have an endpoint of S3 and none of STS
                if "s3" not in wanted:
                    raise
        what = f"s3://{self._cloud.bucket}/ cannot be listed"
        parameters: dict[str, Any] = {"Bucket": self._cloud.bucket, "Prefix": self._cloud.prefix, "MaxKeys": 1}
        await self._aws.call("s3", "list_objects_v2", what=what, budget_s=BUDGET_S, **parameters)
        return f"accepted by {self._endpoint('s3')}"

    def bucket(self) -> Bucket:
        section = self._cloud.s3
        section = section.model_copy(update={"multipart_chunk_bytes": min(PART, section.multipart_chunk_bytes)})
        return S3Bucket(self._aws, self._cloud.bucket, section)

    async def end_upload(self, key: str) -> None:
        await asyncio.shield(self._end_upload(key))

    async def _end_upload(self, key: str) -> None:
        at: dict[str, Any] = {"Bucket": self._cloud.bucket, "Key": key}
        what = f"an upload to s3://{self._cloud.bucket}/{key} cannot be"
        begun = await self._aws.call("s3", "create_multipart_upload", what=f"{what} begun", **at)
        await self._aws.call(
            "s3", "abort_multipart_upload", what=f"{what} ended", **at, UploadId=begun["UploadId"], budget_s=BUDGET_S
        )

    async def advice(self) -> tuple[str, ...]:
        return tuple(filter(None, (await self._lifecycle(), self._checksums())))

    async def _lifecycle(self) -> str:
        """Return advice about a missing lifecycle rule: unfinished uploads cost as much as objects and are not
        listed."""
        bucket = self._cloud.bucket
        what = f"the lifecycle rules of s3://{bucket}/ cannot be read"
        found: list[dict[str, Any]] = []
        try:
            answer = await self._aws.call(
                "s3", "get_bucket_lifecycle_configuration", what=what, budget_s=BUDGET_S, Bucket=bucket
            )
            found = rows(answer, "Rules")
        except NotFoundError:
            pass
        except ConfigError:
            return f"{what} (s3:GetLifecycleConfiguration): see that one ends unfinished uploads after {DAYS} days"
        except RolloutError as error:
            if "NoSuchLifecycleConfiguration" not in error.message:
                return ""  # stores like S3 may have no such rules
        if any(rule.get("Status") == "Enabled" and "AbortIncompleteMultipartUpload" in rule for rule in found):
            return ""
        return f"no lifecycle rule ends uploads that a killed process left unfinished: {_command(bucket, found)}"

    def _checksums(self) -> str:
        if self._cloud.s3.checksums == "when_required" and not self._aws.endpoint("s3"):
            return 'checksums = "when_required" in [cloud.s3] turns off a check that AWS has: leave it at "auto"'
        return ""

    async def close(self) -> None:
        await self._aws.close()


def _command(bucket: str, found: list[dict[str, Any]]) -> str:
    """Return the command that sets the rules. Rules are replaced as a whole, so it includes the existing ones."""
    rule = {
        "ID": "abort-unfinished-uploads",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": DAYS},
    }
    rules = json.dumps({"Rules": [*found, rule]}, default=str)
    return f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration '{rules}'"

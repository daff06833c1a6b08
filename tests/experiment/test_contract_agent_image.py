"""The agent of an experiment in an image of the task's own, which holds the workspace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from image_registry import layer, registry
from job_files import make_task
from rollout.objects.tree import describe, upload
from rollout.workloads.experiment.contracts import EvidenceRecord
from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.sandboxes.images.programs import lacking
from small_root import PROGRAMS, small_root
from trial_rig import job, rig

AGENT = """#!/bin/sh
cat old > /logs/agent/seen
echo new > old
rm gone
ids=$(sed -n '/"ids"/,/}/p' "$AGENTLAB_TASK_PATH")
printf '{%s "outcome": "success"}' "$ids" > "$AGENTLAB_RESULT_PATH"
"""
TOML = '[environment]\ndocker_image = "{image}"\nworkdir = "/testbed"\nmemory_mb = 256\nstorage_mb = 100\n'
TEST = "cp /testbed/old /logs/verifier/ && echo '{\"score\": 1}' > /logs/verifier/reward.json\n"


@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_an_artifact_is_staged_into_the_image_of_a_task(tmp_path: Path) -> None:
    program = tmp_path / "artifact" / "run.sh"
    program.parent.mkdir()
    program.write_text(AGENT)
    program.chmod(0o755)
    agent = {
        "label": "a",
        "import_path": "rollout_worker.trials.agents.contract:ContractAgent",
        "kwargs": {"command": ["/agentlab/agent/run.sh"], "artifact": (await describe(program.parent)).id.hex()},
    }
    contract = {
        "schedule_index": 0,
        "ids": {"trial_id": "trial_000001", "variant_id": "a", "task_id": "t", "repl_idx": 0},
        "task": {},
        "policy": {"timeout_ms": 60_000, "sandbox": {"mode": "bubblewrap"}},
        "workspace": "/testbed",
    }
    files = layer(("testbed/old", b"old\n"), ("testbed/gone", b"x\n"), ("testbed/node_modules/x", b"x\n"))
    async with registry() as here:
        name = here.add("task:1", small_root(PROGRAMS), files, config={"Env": ["PATH=/bin"]}, packed="plain")
        task = make_task(tmp_path / "task", TOML.format(image=name), files={"tests/test.sh": TEST})
        async with rig(job("bubblewrap", agent), tmp_path / "rig", task) as trials:
            try:
                await trials.provider.probe()
            except SandboxRefusedError as error:
                pytest.skip(str(error))
            await upload(program.parent, trials.objects)
            record = await trials.trial(task, agent="a", contract=contract)
            left = trials.files(record)
    assert (record.result.error, record.rewards) == (None, {"score": 1.0})
    assert (left["agent/seen"], left["verifier/old"]) == ("old\n", "new\n")
    refs = EvidenceRecord.decode(left["evidence/evidence.json"].encode()).evidence
    digest = (refs.diff_incremental_ref or "").rpartition("/")[2]
    diff = json.loads(left[f"evidence/artifacts/{digest[:2]}/{digest}"])
    changed = {kind: [row["path"] for row in diff[kind]] for kind in ("added", "removed", "modified")}
    assert changed == {"added": [], "removed": ["gone"], "modified": ["old"]}

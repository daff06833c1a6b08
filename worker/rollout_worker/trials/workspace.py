"""The workspace of an experiment's trial: its snapshots, and its start in a chain of trials.

Files that are ignored or exceed the bounds (`EvidencePolicy`) are not copied out of the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from rollout.storage.disk import FULL
from rollout.workloads.job.record import as_text

from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.errors import SandboxFileError
from rollout_worker.sandboxes.port import MIB, Sandbox
from rollout_worker.sandboxes.trees import Selection
from rollout_worker.trials.blobs import Blobs
from rollout_worker.trials.contracted import Contracted
from rollout_worker.trials.making import admin
from rollout_worker.trials.masking import Masks
from rollout_worker.trials.port import TrialFault
from rollout_worker.trials.snapshots import IGNORED, Snapshot, take

SNAPSHOT_S = 600.0
_SETUP_S = 60.0
_REMOVED_AT_ONCE = 200
_NONE_THERE = frozenset({"ENOENT", "ENOTDIR", "ELOOP", "EINVAL"})
_MEMBER = 1024


class Workspace:
    """`snapshots` are those taken or read, by the hash of their manifest. `remarks` say what is missing."""

    def __init__(self, contract: Contracted, blobs: Blobs, masks: Masks) -> None:
        policy = contract.input.evidence
        self.snapshots = dict[str, Snapshot]()
        self.remarks = list[str]()
        self._contract, self._blobs, self._masks = contract, blobs, masks
        self._path = contract.input.workspace
        self._scratch = contract.files.parent
        self._selection = Selection(
            (*IGNORED, *policy.ignore), policy.file_mb * MIB, policy.workspace_mb * MIB, policy.max_files
        )

    async def snapshot(self, sandbox: Sandbox) -> str | None:
        """Take a snapshot and return the hash of its manifest, or None if that failed, with a remark. Raises
        SandboxError or OSError."""
        directory, most = self._scratch / "workspace", self._selection.max_entries + 1
        left_out, count = tuple[tuple[str, str], ...](), 0
        try:
            async with asyncio.timeout(SNAPSHOT_S):
                moved = await sandbox.download(
                    self._path,
                    directory,
                    max_bytes=self._selection.max_bytes + _MEMBER * most,
                    max_entries=most,
                    selection=self._selection,
                )
            left_out, count = moved.skipped, moved.left_out
            return await asyncio.to_thread(self._take_in, directory, left_out, count)
        except TimeoutError:
            self.remarks.append(f"the workspace was not copied in {SNAPSHOT_S:g} s")
        except SandboxFileError as error:
            if error.context.get("reason") in _NONE_THERE:
                return await asyncio.to_thread(self._note, Snapshot(exists=False))
            self.remarks.append(f"the workspace was not copied: {error.message}")
        except OSError as error:  # an agent's files may be such that they cannot be kept
            if error.errno in FULL:
                raise
            self.remarks.append(f"the workspace was not copied: {error.strerror or error}")
        finally:
            await asyncio.to_thread(trees.remove, str(directory))
        return None

    def _take_in(self, directory: Path, left_out: tuple[tuple[str, str], ...], count: int) -> str:
        if not directory.is_dir():
            return self._note(Snapshot(exists=False))
        self._masks.names(directory)
        hidden = self._mask(directory)
        shown = [(as_text(self._masks.text(path)), as_text(self._masks.text(why))) for path, why in left_out]
        snapshot = take(
            directory, [*shown, *((path, "a link that cannot be shown") for path in hidden)], count + len(hidden)
        )
        for path, entry in snapshot.entries.items():
            if entry.kind == "file":
                (directory / path).rename(self._blobs.path(entry.sha256))
        return self._note(snapshot)

    def _mask(self, directory: Path) -> list[str]:
        """Mask hidden values, and remove links that contain one or that are not valid text. Returns the removed
        names."""
        removed = list[str]()
        for root, names, files in os.walk(directory):
            for path in (Path(root, name) for name in (*names, *files)):
                if path.is_symlink():
                    target = os.readlink(path)  # noqa: PTH115 - as it is written
                    if as_text(self._masks.text(target)) != target:
                        path.unlink()
                        removed.append(str(path.relative_to(directory)))
                elif self._masks.pattern is not None and path.is_file():
                    mode = path.stat().st_mode
                    self._masks.file(path)
                    path.chmod(mode)
        return removed

    def _note(self, snapshot: Snapshot) -> str:
        name = self._blobs.put(snapshot.manifest())
        self.snapshots[name] = snapshot
        return name

    # ---- a chain of trials

    def earlier(self) -> tuple[str, str] | None:
        """Return the hashes of the manifests at the start of the chain and after the predecessor. Blocking.

        Returns None for the first trial. Raises TrialFault if the predecessor left no usable evidence, or OSError.
        """
        if self._contract.predecessor is None:
            return None
        directory = self._contract.predecessor / "evidence"
        try:
            state = json.loads((directory / "chain.json").read_bytes())
            start, post = (str(state[key]).rpartition("/")[2] for key in ("start_ref", "post_ref"))
            for blob in directory.glob("artifacts/*/*"):
                blob.rename(self._blobs.path(blob.name))
            for name in (start, post):
                self.snapshots[name] = Snapshot.from_manifest(json.loads(self._blobs.path(name).read_bytes()))
            trees.remove(str(self._contract.predecessor))
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise TrialFault("task_invalid", f"the workspace of its predecessor cannot be restored: {error}") from error
        return start, post

    async def restore(self, sandbox: Sandbox, now: str, wanted: str, owner: str | None) -> None:
        """Change the workspace from the snapshot `now` to the snapshot `wanted`. `owner` None is root.

        What `wanted` left out stays as it is. Raises SandboxError or OSError.
        """
        there, to_be = self.snapshots[now], self.snapshots[wanted]
        absent = there.entries.keys() - to_be.entries.keys()
        both = there.entries.keys() & to_be.entries.keys()
        replaced = {path for path in both if there.entries[path].kind != to_be.entries[path].kind}
        gone = sorted((absent - to_be.hidden(absent)) | replaced)
        for first in range(0, len(gone), _REMOVED_AT_ONCE):
            paths = [f"{self._path}/{path}" for path in gone[first : first + _REMOVED_AT_ONCE]]
            command = ["rm", "-rf", "--", *paths]
            (await sandbox.exec(command, cwd="/", user=admin(sandbox), timeout_s=_SETUP_S)).check()
        directory = self._scratch / "restored"
        try:
            await asyncio.to_thread(self._build, to_be, directory)
            await sandbox.upload(directory, self._path)
            if owner is not None:
                command = ["chown", "-R", owner, self._path]
                (await sandbox.exec(command, cwd="/", user=admin(sandbox), timeout_s=_SETUP_S)).check()
        finally:
            await asyncio.to_thread(trees.remove, str(directory))
        if missing := [path for path, why in to_be.left_out if why != trees.IGNORED]:
            self.remarks.append(f"of its predecessor's workspace was not restored: {', '.join(missing[:5])}")

    def _build(self, wanted: Snapshot, directory: Path) -> None:
        directory.mkdir()
        for path, entry in sorted(wanted.entries.items(), key=lambda one: (one[1].kind == "link", one[0])):
            target = directory / path  # links come last: nothing is written through one
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.kind == "link":
                target.symlink_to(entry.target)
            elif entry.kind == "directory":
                target.mkdir(exist_ok=True)
                target.chmod(entry.mode)
            else:
                target.write_bytes(self._blobs.path(entry.sha256).read_bytes())
                target.chmod(entry.mode)

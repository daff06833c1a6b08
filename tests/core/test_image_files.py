"""What images are made of: Dockerfiles, build contexts, names and layers."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from image_registry import layer
from rollout.model.errors import ConfigError
from rollout.workloads.job import dockerfile
from rollout.workloads.job.dockerfile import DockerfileError
from rollout_worker.sandboxes.errors import ImageBuildError, ImageNotFoundError
from rollout_worker.sandboxes.images import context, layers, recipe, reference
from rollout_worker.sandboxes.process import open_process


def read(text: str, **inherited: str) -> recipe.Recipe:
    return recipe.read(dockerfile.parse(text), inherited)


# Dockerfiles


def test_a_dockerfile_is_read_as_an_engine_reads_it() -> None:
    found = read(
        "# syntax=docker/dockerfile:1\n"
        "ARG V=12\n"
        "FROM --platform=linux/amd64 debian:${V}-slim AS base\n"
        "ENV A=1 \\\n"
        "    # a comment within\n"
        '\n    B="x y" C=$A$PATH\n'
        "ENV OLD way  of it\n"
        "WORKDIR /app\n"
        "FROM Base\n"
        "ARG V\n"
        "WORKDIR sub/${A:+on}\n"
        "USER me:us\n"
        'RUN ["echo", "$A"]\n'
        "run echo $V \\\n && true\n",
        PATH="/bin",
    )
    assert found.base == "debian:12-slim"
    assert found.env == {"A": "1", "B": "x y", "C": "/bin", "OLD": "way  of it"}
    assert (found.workdir, found.user) == ("/app/sub/on", "me")
    words, line = [step for step in found.steps if isinstance(step, recipe.Run)]
    assert words.argv == ("echo", "$A")
    assert line.argv == ("/bin/sh", "-c", "echo $V  && true")
    assert (line.env["V"], line.cwd, line.user) == ("12", "/app/sub/on", "me")


def test_here_documents_are_files_or_scripts() -> None:
    found = read(
        "FROM x\nENV A=1\n"
        "COPY <<one <<-'two' /to/\n$A\none\n\t$A\n\ttwo\n"
        "RUN <<EOF\necho a\necho b\nEOF\n"
        "RUN cat <<EOF > /x\n$A\nEOF\n"
    )
    copied, script, piped = found.steps
    assert isinstance(copied, recipe.Copy)
    assert [(h.name, h.text) for h in copied.heredocs] == [("one", "1\n"), ("two", "$A\n")]
    assert isinstance(script, recipe.Run)
    assert script.argv[-1] == "echo a\necho b\n"
    assert isinstance(piped, recipe.Run)
    assert piped.argv[-1] == "cat <<EOF > /x\n$A\nEOF"


def test_all_that_cannot_be_carried_out_is_told_at_once() -> None:
    with pytest.raises(DockerfileError) as raised:
        read(
            "FROM a AS one\nRUN x\nFROM b\nCOPY --from=one /x /y\nADD https://x.test/y /y\nRUN --mount=type=bind z\n"
            "COPY only\n"
        )
    for line in ("line 4: COPY: --from=one", "line 5: ADD", "line 6: RUN: --mount", "line 7: COPY: it needs"):
        assert line in raised.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no FROM"),
        ("RUN x\nFROM y", "line 1: RUN stands before FROM"),
        ("FROM x\nFETCH y", "line 2: there is no instruction FETCH"),
        ("FROM x\nRUN <<EOF\nnever", "line 2: the here-document EOF does not end"),
        ("FROM $NOTHING", "line 1: FROM names no image"),
        ("FROM x\nENV A", "line 2: ENV A has no value"),
        ("FROM x\nENV A='b", "a quote is not closed"),
    ],
)
def test_what_is_no_dockerfile(text: str, told: str) -> None:
    with pytest.raises(DockerfileError, match=told):
        read(text)


def test_what_has_no_effect_is_told_and_what_needs_none_is_not() -> None:
    found = read("FROM x\nEXPOSE 80\nLABEL a=b\nCMD x\nHEALTHCHECK CMD y\nRUN --mount=type=cache,target=/c z")
    assert found.remarks == (
        "HEALTHCHECK (line 5) is not run",
        "RUN --mount=type=cache,target=/c (line 6) is an ordinary directory",
    )


@pytest.mark.parametrize(
    ("text", "entrypoint"),
    [
        ("", None),
        ("ENTRYPOINT a 'b c'", ("/bin/sh", "-c", "a 'b c'")),
        ('ENTRYPOINT ["a", "b c"]', ("a", "b c")),
        ("ENTRYPOINT a\nENTRYPOINT []", ()),
    ],
)
def test_the_last_entrypoint_counts(text: str, entrypoint: tuple[str, ...] | None) -> None:
    assert read(f"FROM x\n{text}").entrypoint == entrypoint


# The build context


def test_what_dockerignore_names_is_not_copied(tmp_path: Path) -> None:
    for name in ("keep", "drop", "sub/drop", "logs/a", "logs/keep"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("# not these\ndrop\nlogs/*\n!logs/keep\n")
    names = [name for name, _ in context.files(tmp_path)]
    assert {"keep", "sub/drop", "logs/keep"} <= set(names)
    assert not {"drop", "logs/a"} & set(names)


def test_the_content_id_knows_bytes_modes_and_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    ids = [context.content_id(tmp_path), context.content_id(tmp_path, "x")]
    (tmp_path / "a").chmod(0o755)
    ids.append(context.content_id(tmp_path))
    (tmp_path / "a").write_text("2")
    ids.append(context.content_id(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    ids.append(context.content_id(tmp_path))
    assert len(set(ids)) == 5
    assert context.content_id(tmp_path) == ids[-1]


@pytest.mark.parametrize("source", ["out", "../secret", "nothing", "*.none"])
def test_nothing_outside_of_the_context_is_copied(tmp_path: Path, source: str) -> None:
    directory, target = tmp_path / "context", tmp_path / "target"
    directory.mkdir()
    target.mkdir()
    (tmp_path / "secret").write_text("x")
    (directory / "out").symlink_to(tmp_path / "secret")
    with pytest.raises(ImageBuildError):
        context.gather(directory, source, target, extract=False)
    assert list(target.iterdir()) == []


# Names of images


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("me/it:1.2", "docker.io/me/it:1.2"),
        ("localhost/x", "localhost/x:latest"),
        ("reg.test:5000/a/b:c", "reg.test:5000/a/b:c"),
        (f"x@sha256:{'a' * 64}", f"docker.io/library/x@sha256:{'a' * 64}"),
    ],
)
def test_names_of_images(text: str, whole: str) -> None:
    assert str(reference.parse(text)) == whole


@pytest.mark.parametrize("text", ["", "UPPER", "a b", "x:", "x@sha256:12", "a//b", "../x"])
def test_what_names_no_image(text: str) -> None:
    with pytest.raises(ImageNotFoundError):
        reference.parse(text)


# Layers


def lay(root: Path, *tars: bytes) -> None:
    for tar in tars:
        archive = root.with_name("archive")
        archive.write_bytes(tar)
        layers.unpack_file(archive, root)


def test_whiteouts_hide_what_earlier_layers_have(tmp_path: Path) -> None:
    root = tmp_path / "root"
    lay(
        root,
        layer(("a", b"1"), ("d/x", b"1"), ("d/y/z", b"1"), ("e/x", b"1"), ("f", b"1")),
        layer((".wh.a", b""), ("d/new", b"2"), ("d/.wh..wh..opq", b""), ("e", b"a file now"), ("f/in", b"2")),
    )
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert found == {"d/new", "e", "f/in"}


def test_links_and_modes_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "root"
    lay(root, layer(("file", b"1"), ("hard", (tarfile.LNKTYPE, "file")), ("soft", (tarfile.SYMTYPE, "/file"))))
    assert (root / "hard").stat().st_ino == (root / "file").stat().st_ino
    assert str((root / "soft").readlink()) == "/file"
    assert (root / "file").stat().st_mode & 0o7777 == (0o4755 if os.geteuid() == 0 else 0o755)


def test_a_layer_writes_through_links_of_earlier_ones_but_never_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = tmp_path / "outside"
    outside.mkdir()
    lay(
        root,
        layer(("usr/lib", None), ("lib", (tarfile.SYMTYPE, "usr/lib")), ("out", (tarfile.SYMTYPE, str(outside)))),
        layer(("lib/x", b"in"), ("out/x", b"kept in"), ("up", (tarfile.SYMTYPE, "../../..")), ("up/y", b"too")),
        layer(("../../z", b"too"), ("/abs", b"too"), ("null", (tarfile.CHRTYPE, ""))),
    )
    assert (root / "usr/lib/x").read_bytes() == b"in"
    assert (root / str(outside).lstrip("/") / "x").read_bytes() == b"kept in"
    assert list(outside.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "outside", "root"]
    assert all((root / name).is_file() for name in ("y", "z", "abs"))
    assert not (root / "null").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"no tar at all, but long enough to be read as one" * 20,
        layer(("hard", (tarfile.LNKTYPE, "../../etc/shadow"))),
        layer(("file", b"x" * 2000))[:1500],
        b"\x1f\x8b" + b"x" * 100,
        b"\x28\xb5\x2f\xfd" + b"x" * 100,
    ],
)
def test_a_damaged_layer_is_told(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(layers.LayerError):
        lay(tmp_path / "root", data)


def test_a_wrong_choice_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"provider_config\.image"):
        open_process(tmp_path, {"image": "maybe"})

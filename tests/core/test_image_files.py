"""What images are made of: Dockerfiles, build contexts, names and layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout.model.errors import ConfigError
from rollout.workloads.job import dockerfile
from rollout.workloads.job.dockerfile import DockerfileError
from rollout_worker.sandboxes.errors import ImageBuildError
from rollout_worker.sandboxes.images import context, recipe
from rollout_worker.sandboxes.images.registry import registry_of
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
    assert found.remarks == [
        "HEALTHCHECK (line 5) is not run",
        "RUN --mount=type=cache,target=/c (line 6) is an ordinary directory",
    ]


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
    ("name", "registry"),
    [
        ("debian", "docker.io"),
        ("me/it:1.2", "docker.io"),
        ("index.docker.io/me/it", "docker.io"),
        ("localhost/x", "localhost"),
        ("reg.test:5000/a/b:c", "reg.test:5000"),
    ],
)
def test_the_registry_of_a_name(name: str, registry: str) -> None:
    assert registry_of(name) == registry


def test_a_wrong_choice_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"provider_config\.image"):
        open_process(tmp_path, {"image": "maybe"})

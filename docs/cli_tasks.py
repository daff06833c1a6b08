"""What docs/cli.md says of the commands by task; `generate.py` adds what the commands say of themselves."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.cli.commands.standard import EVENTS, PLACE

INTRODUCTION = """\
# Commands

`rollout` submits and watches work, `rollout-coordinator` leads a cluster, `rollout-worker` works for it.

```
rollout infer batch --config batch.toml --name nightly --detach
rollout run show @last
rollout run pause nightly
```

Written by `python docs/generate.py`. Every command has `-h` (which also shows bounds) and
`--version`. In `--limit N=50`, 50 is the default.

**Exit codes:** 0 success; 1 the work failed, or something it needs is missing; 2 configuration, input or usage; 130
interrupted. Also 1 if standard output is closed or full, but a workload finishes its files.

**Errors** are one message on standard error, `error [code]: ...`. With `--json`, standard output also has
`{"error":{code,message,faults}}`. Codes are stable, and JSON keys are only ever added. "--json lines" means an object
per line; a name before the braces is its `event`.

**Shell completion** for bash, zsh and fish: `rollout --install-completion`.
"""


def one_line(text: str) -> str:
    return " ".join(text.split())


def compact(text: str) -> str:
    """Without the spaces in the shapes of JSON."""
    depth, letters = 0, list[str]()
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if not (letter == " " and depth and letters[-1] in ",:"):
            letters.append(letter)
    return "".join(letters)


WORKLOAD = f"""\
Also: [cluster](#cluster-options) without `--dir`.

{one_line(PLACE)}

{compact(one_line(EVENTS.format(unit="UNITS", rates="RATES", events=""))).removesuffix(" Keys are only ever added.")}"""


@dataclass(frozen=True)
class Group:
    """Options that many commands take together."""

    name: str
    options: tuple[str, ...]
    text: str = ""

    @property
    def title(self) -> str:
        return f"{self.name.capitalize()} options"

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-")


GROUPS = (
    Group("cluster", ("--coordinator", "--tls-dir", "--context", "--dir", "--json")),
    Group(
        "workload",
        (
            "--coordinator", "--tls-dir", "--context", "--local", "--workers", "--resume", "--dry-run", "--detach",
            "--json",
        ),
        text=WORKLOAD,
    ),
    Group("input", ("--format", "--split", "--columns", "--limit", "--sample", "--sample-seed")),
    Group("token", ("--token", "--token-file")),
)  # fmt: skip
COMMON = (
    "RUN",
    "RUN|DIR",
    "WORKER",
    "NAME",
    "--config",
    "--name",
    "--json",
    "--reason",
    "--runs-dir",
    "--allow-different-hardware",
)


@dataclass(frozen=True)
class Task:
    title: str
    text: str
    commands: tuple[str, ...]


TASKS = (
    Task(
        "Start work",
        """
```
rollout plan --config batch.toml              # check everything, start nothing
rollout infer preview --config batch.toml     # prompts and numbers of tokens
rollout infer batch --config batch.toml       # here, or on the joined cluster
rollout infer batch --config batch.toml --extend            # only rows added since
rollout infer retry out                                     # failed rows
rollout map words:count --input in.jsonl --output out
```

`--dry-run` checks the same as `plan`, with the command's options.
""",
        (
            "rollout infer batch",
            "rollout infer preview",
            "rollout infer retry",
            "rollout map",
            "rollout plan",
            "rollout model make-tiny",
        ),
    ),
    Task(
        "Run tests",
        """
See [test.md](test.md). A project with pytest needs no configuration.

```
rollout test run                              # all tests
rollout test run tests/test_api.py "tests/test_db.py::test_insert[two rows]"
rollout test logs --failures                  # failures with output
rollout test rerun-failed
rollout test history --sort flaky             # which tests are unstable
```
""",
        (
            "rollout test run",
            "rollout test rerun-failed",
            "rollout test collect",
            "rollout test logs",
            "rollout test history",
            "rollout test bisect",
            "rollout test init",
            "rollout test validate",
        ),
    ),
    Task(
        "Train",
        """
See [train.md](train.md). The same command resumes, to the same bytes.

```
rollout train sft --config train.toml
rollout train verify @last --all              # repeat every segment: same bytes?
rollout snapshot export 8fb5aeef56d7 --output model
```
""",
        (
            "rollout train sft",
            "rollout train rm",
            "rollout train dpo",
            "rollout train ipo",
            "rollout train kto",
            "rollout train grpo",
            "rollout train ppo",
            "rollout train fork",
            "rollout train verify",
            "rollout train plot",
            "rollout train samples",
            "rollout snapshot list",
            "rollout snapshot show",
            "rollout snapshot export",
            "rollout snapshot prune",
        ),
    ),
    Task(
        "Evaluate agents",
        """
See [job.md](job.md).

```
rollout job run job.yaml
rollout job tail nightly 'hello/*/mine/*'     # output of agents and verifiers
```
""",
        ("rollout job run", "rollout job resume", "rollout job tail"),
    ),
    Task(
        "Compare variants of an agent",
        """
See [experiment.md](experiment.md).

```
rollout experiment run experiment.yaml --dry-run --effect 0.1
rollout experiment run experiment.yaml
rollout experiment describe @last
```
""",
        (
            "rollout experiment run",
            "rollout experiment continue",
            "rollout experiment describe",
            "rollout experiment schema",
            "rollout experiment pause",
            "rollout experiment resume",
            "rollout experiment kill",
            "rollout experiment recover",
            "rollout experiment fork",
            "rollout experiment replay",
        ),
    ),
    Task(
        "Say which variant is better",
        """
See [experiment.md](experiment.md#which-variant-is-better). Any two runs with the same tasks can be compared.

```
rollout experiment analyze @last --margin 0.02
rollout experiment analyze evals/base evals/trained      # two jobs, task by task
rollout experiment report fix-bugs
```
""",
        (
            "rollout experiment analyze",
            "rollout experiment report",
            "rollout experiment query",
            "rollout experiment views",
            "rollout experiment trend",
        ),
    ),
    Task(
        "Look at evaluations",
        """
See [job.md](job.md). A job is named by its directory or its run.

```
rollout job show nightly                      # agents, rates with intervals, pass@k, errors
rollout job show nightly hello/one/mine/2     # one trial
rollout job export nightly --output nightly.html
rollout job compare nightly today
rollout job regrade nightly --tasks 'hello/*' # with the current tests
```
""",
        ("rollout job show", "rollout job export", "rollout job compare", "rollout job regrade"),
    ),
    Task(
        "Make tasks for agents",
        """
See [job.md](job.md).

```
rollout task init hello/write-hello
rollout task check hello                      # faults and warnings
rollout task oracle hello                     # the solution passes, doing nothing fails
```
""",
        ("rollout task init", "rollout task check", "rollout task oracle"),
    ),
    Task(
        "Watch it",
        """
```
rollout run list --state running
rollout run watch @last
```
""",
        (
            "rollout run list",
            "rollout run show",
            "rollout run watch",
            "rollout events",
            "rollout workers",
            "rollout workers list",
            "rollout workers show",
        ),
    ),
    Task(
        "Answer requests of OpenAI's clients",
        """
See [serve.md](serve.md).

```
rollout serve --config serve.toml --listen 0.0.0.0:8000 --workers 2
```
""",
        ("rollout serve",),
    ),
    Task(
        "See it in a browser",
        """
See [ui.md](ui.md).

```
rollout ui --open                             # --dir out: of a private cluster
rollout report @last --output report.html     # one run as one file
```
""",
        ("rollout ui", "rollout report"),
    ),
    Task(
        "Find out what went wrong",
        """
[failures.md](failures.md) lists failures, symptoms and remedies. Rows are counted from 1.

```
rollout run show @last                        # what waits for what, and why
rollout run items @last --failed              # or --running, --retried, --pending
rollout item show @last 43                    # input, output and attempts
rollout logs @last --follow                   # output of functions and engines
```
""",
        ("rollout run items", "rollout item show", "rollout item cancel", "rollout logs", "rollout doctor"),
    ),
    Task(
        "Get results",
        """
A workload's command writes results as they come; given again, it collects those of a detached run.

```
rollout run results nightly --output results
```
""",
        ("rollout run results",),
    ),
    Task(
        "Command a run",
        """
```
rollout run kill E0AD --reason "wrong model"
rollout run delete E0AD
```
""",
        (
            "rollout run pause",
            "rollout run resume",
            "rollout run kill",
            "rollout run delete",
        ),
    ),
    Task(
        "Operate a cluster",
        """
```
rollout-coordinator run --config coordinator.toml
rollout-coordinator token create --role worker        # on the coordinator's host
rollout-worker join --coordinator HOST:JOIN_PORT --token TOKEN
rollout-worker run
```
""",
        (
            "rollout-coordinator run",
            "rollout-coordinator token create",
            "rollout-coordinator join",
            "rollout-coordinator host list",
            "rollout-coordinator host revoke",
            "rollout-coordinator authority",
            "rollout-worker run",
            "rollout-worker join",
            "rollout version",
            "rollout-coordinator version",
            "rollout-worker version",
            "rollout workers drain",
            "rollout workers reload",
        ),
    ),
    Task(
        "Use a cloud provider's account",
        """
See [cloud.md](cloud.md).

```
rollout cloud doctor --provider aws --config train.toml
```
""",
        ("rollout cloud doctor", "rollout-coordinator adopt-objects"),
    ),
    Task(
        "Clusters and contexts",
        """
```
rollout join --coordinator head:50052 --token-file token      # makes and uses the context "prod"
rollout infer batch --config batch.toml                       # runs there
rollout context use staging
rollout run list --context prod
```

A line (or the event `cluster`) names the command's cluster and why. The first of these that is set decides:

1. the options `--coordinator`, `--context`, `--dir` and `--local`, then `--tls-dir` of a joined cluster;
2. `ROLLOUT_COORDINATOR`, then `ROLLOUT_CONTEXT`;
3. `./rollout.toml`;
4. the cluster joined with the certificates in `./data/tls`;
5. the context in use: the last one joined, or that of `rollout context use`;
6. none: a workload starts a private cluster while it runs.

One address is enough: clients and workers learn and remember the other coordinators. `./rollout.toml`:

```toml
[transport]
coordinator_addrs = ["coordinator-1:50051", "coordinator-2:50051"]
tls_dir = "/home/me/tls"
```

**Private clusters** are inspected in their output directory, in its parent, or with `--dir DIR`; if the command has
ended, a coordinator starts for the answer. An output directory stays with its cluster: a command for another cluster is
refused, and the error names the command that resumes.

**A killed run** resumes only with `--resume RUN`; a failed or interrupted one by the same command.
""",
        (
            "rollout join",
            "rollout context list",
            "rollout context use",
            "rollout context add",
            "rollout context remove",
        ),
    ),
)

ENVIRONMENT = """\
## Environment

`ROLLOUT_<SECTION>__<KEY>` sets any key of [configuration.md](configuration.md). These are no keys:"""

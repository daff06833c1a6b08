"""What docs/cli.md says of the commands by task; `generate.py` adds what the commands say of themselves."""

from __future__ import annotations

from dataclasses import dataclass

INTRODUCTION = """\
# Commands

`rollout` submits work, watches and commands it; `rollout-coordinator` leads a cluster; `rollout-worker` works for it.
This page is grouped by what you want to do; the [complete reference](#complete-reference) has every option.

Written by `python docs/generate.py`; a test keeps it complete.

**For every command.** `-h` shows its help, `--version` the version. `--json` is for programs: its keys are only ever
added. Exit codes: 0 success; 1 the work itself failed, or something it needs is not there; 2 configuration or usage;
130 interrupted. What went wrong is one message on standard error, `error [code]: ...`: what happened, why, what to do
next. With `--json`, standard output has it too, as `{"error": {code, message, faults}}`; codes do not change.

**Runs and workers** are named by their id, or by any unique beginning of it or of the eight characters that are shown
of it (`E0AD2RFD`), in capitals or not. A run also by its name (`--name`, by default that of its output directory; the
newest that has it), and the last one that you submitted from this machine by `@last`. A worker also by its host, where
it is the only one there.

```
rollout run show @last
rollout run pause nightly
rollout run show E0AD
```

**Shell completion** of commands, options, runs and workers, for bash, zsh and fish: `rollout --install-completion`, or
`rollout --show-completion` to put it where you want. Runs and workers are asked of the cluster, for a second at most.

**Standard output that is closed or full** (`>&-`, `>/dev/full`) is told in one sentence on standard error, and the exit
code is 1. It is 1 without a word where nobody reads it any more (`| head`). A workload says so, and finishes its work
all the same: only its progress is lost, the results are in its files, and it still ends with 1. A daemon goes on, and
so does its log when there is room again. What your locale has no letters for is shown with escapes (`\\xe9`); a byte of
a file name that is no text, as `\\xff`.
"""


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
rollout infer preview --config batch.toml     # what the model will read, and how many tokens
rollout infer batch --config batch.toml       # on this machine, or on the cluster that was joined
rollout infer batch --config batch.toml --name nightly --detach
rollout infer batch --config batch.toml --extend            # rows were added to the input: only these
rollout infer batch --config batch.toml --follow            # and go on with those that come, until Ctrl-C
rollout infer retry out                                     # the rows that failed
rollout map words:count --input in.jsonl --output out
```

The same command goes on where it was, however it ended. `--dry-run` checks and says the same as `plan`, and takes the
options of the command into account.
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
In a project with tests of pytest, without a file. [test.md](test.md) has the files, and what a run prints.

```
rollout test run                              # all tests, on the cores of this machine or on the cluster
rollout test run tests/test_api.py "tests/test_db.py::test_insert[two rows]"
rollout test logs --failures                  # what failed, with its output
rollout test rerun-failed
rollout test history --sort flaky             # which tests fail now and then
rollout test bisect tests/test_api.py::test_total     # which test spoils it by running before it
rollout test init                             # writes an offload.toml, which you may change
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
The same command goes on where it was, to the same bytes. [train.md](train.md) has the files, and what a run prints.

```
rollout train sft --config train.toml --dry-run
rollout train sft --config train.toml
rollout train verify @last --all              # train every segment again elsewhere: the same bytes?
rollout train fork @last --step 400 --config other.toml
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
[job.md](job.md) has job.yaml, tasks and the files of a job. The same command goes on where it was, also after attempts,
agents or tasks were added.

```
rollout job run job.yaml --dry-run
rollout job run job.yaml
rollout job run job.yaml --retry-errors environment_start_failed,agent_install_failed
rollout job tail nightly 'hello/*/mine/*'     # what agents and verifiers print
```
""",
        ("rollout job run", "rollout job resume", "rollout job tail"),
    ),
    Task(
        "Compare variants of an agent",
        """
An experiment.yaml names variants, tasks and how often each is tried: [experiment.md](experiment.md).

```
rollout experiment run experiment.yaml --dry-run --effect 0.1
rollout experiment run experiment.yaml        # the same command goes on with a run that did not end
rollout experiment describe @last
rollout experiment pause fix-bugs --label lunch
rollout experiment continue fix-bugs
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
Of experiments, and of any two runs with the same tasks: [experiment.md](experiment.md#which-variant-is-better).

```
rollout experiment analyze @last --margin 0.02
rollout experiment analyze evals/base evals/trained      # two jobs, task by task
rollout experiment report fix-bugs
rollout experiment query fix-bugs "SELECT task_id, pass_rate FROM task_difficulty LIMIT 10"
rollout experiment trend
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
Of jobs: [job.md](job.md). A job is named by its directory, or as its run.

```
rollout job show nightly                      # agents, rates with intervals, pass@k, errors
rollout job show nightly --failed
rollout job show nightly hello/one/mine/2     # all of one trial
rollout job export nightly --output nightly.html
rollout job compare nightly today
rollout job regrade nightly --tasks 'hello/*' # with the tests as they are now
```
""",
        ("rollout job show", "rollout job export", "rollout job compare", "rollout job regrade"),
    ),
    Task(
        "Make tasks for agents",
        """
[job.md](job.md) has the files of a task.

```
rollout task init hello/write-hello           # a small task, to be changed into yours
rollout task check hello                      # every fault and what often goes wrong, of all tasks in a directory
rollout task oracle hello                     # solutions pass, and an agent that does nothing does not
```
""",
        ("rollout task init", "rollout task check", "rollout task oracle"),
    ),
    Task(
        "Watch it",
        """
```
rollout run list --state running
rollout run show @last
rollout run watch @last
rollout workers
rollout workers show gpu-1
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
[serve.md](serve.md): addresses, API keys, what a request survives, switches of the model.

```
rollout serve --config serve.toml                           # until Ctrl-C
rollout serve --config serve.toml --listen 0.0.0.0:8000 --workers 2
```
""",
        ("rollout serve",),
    ),
    Task(
        "See it in a browser",
        """
[ui.md](ui.md): who may look, and what it costs.

```
rollout ui --open                             # of the cluster, or of a private one: --dir out
rollout report @last --output report.html     # one run as one file
```
""",
        ("rollout ui", "rollout report"),
    ),
    Task(
        "Find out what went wrong",
        """
`run show` says what waits for what, and why something cannot start. Rows are counted from 1, as in `errors.jsonl`.
`ROLLOUT_DEBUG=1` shows tracebacks. [failures.md](failures.md) lists what can go wrong, how it shows and what to do.

```
rollout run show @last
rollout run items @last --failed              # or --running, --retried, --pending
rollout item show @last 43                    # input, output and every attempt of row 43
rollout item cancel @last 43                  # end row 43 without a result, such as one that hangs
rollout logs @last --follow                   # what functions and engines printed, of all workers
rollout events @last                          # what happened to the run, and to the cluster in its time
```
""",
        ("rollout run items", "rollout item show", "rollout item cancel", "rollout logs", "rollout doctor"),
    ),
    Task(
        "Get results",
        """
A workload's command writes its files as results come. Given again, it collects what a detached run has done since.
`run results` writes the files of any run anywhere, without its input; of one that goes on, what is committed so far.

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
rollout run pause nightly
rollout run resume nightly
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
rollout-worker run                                    # reads ./worker.toml, if it is there
```

On a terminal the daemons log sentences: a line for each day that begins, local time, short ids, `warning:` or `error:`
before what is one, each trouble said once and then now and then (`still, for 20 s
(12 times): ...`). Otherwise a line is a JSON object; `[logging] format` decides.
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
            "rollout workers drain",
            "rollout workers reload",
        ),
    ),
    Task(
        "Use a cloud provider's account",
        """
[cloud.md](cloud.md) begins with a first try.

```
rollout cloud doctor --provider aws --config train.toml && rollout train sft --config train.toml
rollout cloud doctor --provider gcp --config infer.toml --without queue --format json
```
""",
        ("rollout cloud doctor", "rollout-coordinator adopt-objects"),
    ),
    Task(
        "Clusters and contexts",
        """
```
rollout join --coordinator head:50052 --token-file token      # makes the context "prod", named after the cluster
rollout infer batch --config batch.toml                       # goes to it: cluster prod at head:50051 (joined)
rollout context use staging                                   # from now on, where nothing else names a cluster
rollout run list --context prod
rollout infer batch --config batch.toml --local               # on this machine, whatever is joined
```

One rule says which cluster a command speaks to. A line says which one it is and why as soon as the cluster has answered
(for `rollout run`, `workers` and the like on standard error; with `--json` of a workload as the event `cluster`); when
that takes longer than two seconds, `asking HOST:PORT` and the reason come before it. The first of these that there is:

1. the options `--coordinator`, `--context`, `--dir` and `--local`, then `--tls-dir` of a cluster that was joined;
2. `ROLLOUT_COORDINATOR`, then `ROLLOUT_CONTEXT`;
3. `./rollout.toml`;
4. the cluster that was joined with the certificates in `./data/tls`;
5. the context in use: the one joined last, or that of `rollout context use`;
6. none: a workload starts a private cluster, which lives as long as the command.

One address is enough: the cluster tells of its other coordinators, and clients and workers keep them, also in the
`join.json` of the identity. Those that it told of once are asked when none of the present ones answers.
`./rollout.toml`:

```toml
[transport]
coordinator_addrs = ["coordinator-1:50051", "coordinator-2:50051"]
tls_dir = "/home/me/tls"
```

**Private clusters** are looked at like others, in their output directory, in the one above it, or with `--dir`:

```
rollout run list --dir out
cd out && rollout run watch @last
```

Where the command that made one still works, its coordinator answers; where it has ended, a coordinator is started for
as long as the answer takes, and `--follow` and `watch` show what there is. An output directory keeps to the cluster
where its run was started: a private run goes on privately, and one that is on another cluster than the command would go
to is refused with the command that goes on.

**A run that somebody killed** does not start again by itself: the same command says who killed it, when and why, and
asks for `--resume RUN`. One that failed or was interrupted goes on by the same command.
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

Every key of a configuration file can be set as `ROLLOUT_<SECTION>__<KEY>` ([configuration.md](configuration.md)); one
that no program knows is refused, with the nearest that there is. These are no keys:"""

REFERENCE = "Every command and every option, as the programs themselves tell of them."

"""Agents that mean harm, each with the task it is let loose upon and what its trial must come to.

What an agent does is its task's instruction, a bash script. Where a verifier looks for what must not be there, its
reward is 1 if it finds nothing and 0 if it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from job_rig import SMALL

ENDED = "[verifier]\nkeep_processes = false\n"
"""What the agent leaves running does not see how it is verified."""
TIMEOUT = "agent_execution_timeout"
FAILED = "agent_execution_failed"


@dataclass(frozen=True)
class Attack:
    """`reward` and `error`: what the trial's result must say. `only`: the provider that promises to withstand it."""

    agent: str
    test: str
    reward: float | None = 1.0
    error: str | None = None
    toml: str = ENDED + SMALL
    files: dict[str, str] = field(default_factory=dict[str, str])
    only: str | None = None


def limited(seconds: float, environment: str = SMALL) -> str:
    return f"[agent]\ntimeout_sec = {seconds}\n{ENDED}{environment}"


NO_PROCESSES = """
# Beside the commands of this script there is nothing but what every sandbox has.
for directory in /proc/[0-9]*; do
  if tr '\\0' ' ' < "$directory/cmdline" 2> /dev/null | grep -q 'le[f]tover'; then
    echo "a process of the agent: $directory"; tr '\\0' ' ' < "$directory/cmdline"
    found=1
  fi
done
"""
VERDICT = 'if [ -z "$found" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
SEPARATE = """artifacts = ["/app/result.txt"]
[verifier]
environment_mode = "separate"
"""
LEFTOVER = "(setsid bash -c 'exec -a leftover sleep 4242' > /dev/null 2>&1 < /dev/null &)"

CONNECT = """
python3 - > /app/reached.txt <<'PYTHON'
import socket
tries = [(socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_UNIX, "\\x00ABSTRACT"), (socket.AF_INET6, ("::1", PORT))]
for family, address in tries:
    try:
        with socket.socket(family) as s:
            s.settimeout(5)
            s.connect(address)
            print(family.name, "reached")
    except OSError:
        pass
PYTHON
"""
"""PORT and ABSTRACT: where the test listens, on this host."""

ATTACKS = {
    "leaves-a-daemon": Attack(
        agent=LEFTOVER + "\necho done > /app/result.txt",
        test=NO_PROCESSES + "[ -e /app/result.txt ] || found=1\n" + VERDICT,
    ),
    "looked-for-from-a-separate-verifier": Attack(
        agent=LEFTOVER
        + "\nmkdir -p /app/hidden\n"
        + "for f in /app/hidden/x /tmp/secret ~/secret /tests/x /solution/x /logs/agent/x; do echo secret > $f; done\n"
        + "echo done > /app/result.txt",
        test=NO_PROCESSES
        + "for f in /app/hidden /tmp/secret ~/secret /tests/x /solution/x /logs/agent/x; do\n"
        + '  if [ -e "$f" ]; then echo "seen: $f"; found=1; fi\ndone\n'
        + '[ "$(cat /app/result.txt)" = done ] || found=1\n'
        + VERDICT,
        toml=SEPARATE + SMALL,
    ),
    "tries-the-closed-network": Attack(
        agent=CONNECT,
        test="cat /app/reached.txt; [ -e /app/reached.txt ] && [ ! -s /app/reached.txt ] || found=1\n" + VERDICT,
        toml=SMALL + 'network_mode = "no-network"\n',
    ),
    "goes-around-the-allowlist": Attack(
        agent=CONNECT,
        test="cat /app/reached.txt; [ -e /app/reached.txt ] && [ ! -s /app/reached.txt ] || found=1\n" + VERDICT,
        toml=SMALL + 'network_mode = "allowlist"\nallowed_hosts = ["example.org"]\n',
    ),
    "tries-the-host-from-the-open-network": Attack(
        agent=CONNECT,
        test="cat /app/reached.txt; [ -e /app/reached.txt ] && [ ! -s /app/reached.txt ] || found=1\n" + VERDICT,
    ),
    "fork-bomb": Attack(
        agent="bomb() { bomb leftover | bomb leftover & }\nbomb 2> /dev/null\nwhile :; do :; done",
        test="n=0; for i in 1 2 3 4 5; do n=$((n + $(echo 1 | cat))); done; [ $n = 5 ] || found=1\n"
        + NO_PROCESSES
        + VERDICT,
        error=TIMEOUT,
        toml=limited(2),
    ),
    "fills-the-disk": Attack(  # everything in it is ended, and its verifier has as much room again
        agent="for n in $(seq 100); do head -c 20000000 /dev/zero > /app/fill-$n || break; sleep 0.1; done; exit 7",
        test="head -c 1000000 /dev/zero > /app/more || found=1\n" + VERDICT,
        error=FAILED,
        toml=limited(60, SMALL.replace("storage_mb = 100", "storage_mb = 60")),
    ),
    "ignores-signals": Attack(
        agent="trap '' TERM INT HUP QUIT USR1\necho leftover > /app/begun\nwhile :; do sleep 0.1; done",
        test=NO_PROCESSES + "[ -e /app/begun ] || found=1\n" + VERDICT,
        error=TIMEOUT,
        toml=limited(1),
    ),
    "daemon-that-writes-rewards": Attack(
        agent="""
cat > /app/leftover.sh <<'SCRIPT'
while :; do
  echo '{"reward": 1000}' > /logs/verifier/reward.json
  echo 1000 > /logs/verifier/reward.txt
  echo 1000 > /app/answer.txt
  sleep 0.02
done
SCRIPT
echo 0.25 > /app/answer.txt
(setsid bash /app/leftover.sh > /dev/null 2>&1 < /dev/null & )
trap '' TERM; (nohup bash /app/leftover.sh > /dev/null 2>&1 < /dev/null & ); sleep 0.2; echo 0.25 > /app/answer.txt
""",
        # Whatever it was when the agent was ended, it does not change any more.
        test="echo 7 > /app/answer.txt; sleep 0.4; cat /app/answer.txt > /logs/verifier/reward.txt",
        reward=7.0,
    ),
    "reads-the-tests-early": Attack(
        agent="""
find /tests /solution /oracle /logs/verifier -mindepth 1 > /app/seen.txt 2> /dev/null
(setsid bash -c 'while :; do find /tests /solution -mindepth 1; sleep 0.01; done >> /app/seen.txt' 2> /dev/null < /dev/null & )
echo '#!/bin/bash' > /tests/test.sh; echo 'echo 1000 > /logs/verifier/reward.txt' >> /tests/test.sh
mkdir -p /tests/helper; echo 1000 > /tests/helper/planted; chmod 000 /tests/test.sh
sleep 0.3
grep -v -e /tests/test.sh -e /tests/helper /app/seen.txt > /app/others.txt
true
""",
        test="[ -s /app/others.txt ] && { cat /app/others.txt; found=1; }\n"
        "[ -e /tests/helper/planted ] && { echo planted; found=1; }\n" + VERDICT,
        files={"tests/expected.txt": "42\n", "solution/solve.sh": "true\n"},
    ),
    "plants-a-reward": Attack(
        agent="""
echo '{"reward": 1000}' > /logs/verifier/reward.json
echo 1000 > /logs/verifier/reward.txt
chmod 444 /logs/verifier/reward.json; chattr +i /logs/verifier/reward.json 2> /dev/null
true
""",
        test="echo 0.5 > /logs/verifier/reward.txt",
        reward=0.5,
    ),
    "plants-a-directory-for-the-reward": Attack(
        agent="mkdir -p /logs/verifier/reward.json/deep /logs/verifier/reward.txt; chmod 000 /logs/verifier/reward.json",
        test="echo 0.5 > /logs/verifier/reward.txt",
        reward=0.5,
    ),
    "plants-a-link-for-the-logs": Attack(
        agent="rm -rf /logs/verifier; mkdir -p /app/mine; ln -s /app/mine /logs/verifier\n"
        "echo '{\"reward\": 1000}' > /app/mine/reward.json",
        test="echo 0.5 > /logs/verifier/reward.txt",
        reward=0.5,
    ),
    "goes-on-in-the-verifiers-time": Attack(
        agent="""
cat > /app/leftover.sh <<'SCRIPT'
while [ ! -e /tests/expected.txt ]; do sleep 0.01; done
cp /tests/expected.txt /app/answer.txt
SCRIPT
(setsid bash /app/leftover.sh > /dev/null 2>&1 < /dev/null & )
true
""",
        test="sleep 0.4; if cmp /tests/expected.txt /app/answer.txt; then echo 1; else echo 0; fi"
        " > /logs/verifier/reward.txt",
        reward=0.0,
        files={"tests/expected.txt": "42\n"},
    ),
    "kills-and-spies": Attack(
        agent="""
kill -9 CANARY 2> /dev/null && echo "killed CANARY" >> /app/found.txt
kill -9 -1 2> /dev/null
true
""",
        test="[ -e /app/found.txt ] && cat /app/found.txt\n" + NO_PROCESSES + VERDICT,
        error=FAILED,  # it killed itself
    ),
    "spies-on-processes": Attack(
        agent="cat /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n' | grep -a '^CANARY_SEC[R]ET=' > /app/found.txt; true",
        test="[ -s /app/found.txt ] && { cat /app/found.txt; found=1; }\n" + VERDICT,
    ),
    "escapes-to-the-hosts-files": Attack(
        agent="""
for path in CANARY_FILE /proc/1/rootCANARY_FILE /proc/self/../1/cwdCANARY_FILE; do
  cat "$path" >> /app/found.txt 2> /dev/null
  echo overwritten > "$path" 2> /dev/null
done
nsenter --target 1 --mount cat CANARY_FILE >> /app/found.txt 2> /dev/null
mkdir -p /app/mnt && mount --bind / /app/mnt 2> /dev/null && cat /app/mntCANARY_FILE >> /app/found.txt 2> /dev/null
ln -s CANARY_FILE /logs/agent/link; ln -s / /logs/agent/root
mkdir -p /logs/artifacts; ln -s CANARY_FILE /logs/artifacts/link
true
""",
        test="[ -s /app/found.txt ] && { cat /app/found.txt; found=1; }\n" + VERDICT,
        only="bubblewrap",
    ),
}

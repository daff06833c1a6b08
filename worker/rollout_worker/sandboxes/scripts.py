"""Scripts that run in sandboxes reached by exec only, for any POSIX sh on Linux.

Other programs they use are those that coreutils and busybox both have, and `tar` for trees. Every script may be run
again, because a connection may drop after it ran and before its answer arrives.

    BASE/TOKEN/command            the script to run
    BASE/TOKEN/started/           made by whoever starts it: once
    BASE/TOKEN/pid                "PID START" of its supervisor, which outlives the exec that started it
    BASE/TOKEN/stdout, stderr     its output
    BASE/TOKEN/in.N, in.end       pieces of its standard input, and their number
    BASE/TOKEN/status             "CODE HOW LIMIT", once it has ended
    BASE/t-TOKEN                  a file in transit
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from shlex import quote

FAULT = 9
"""Exit code of a script that found a file error and printed the name of its errno."""

PRELUDE = r"""
umask 022
no() { printf %s "$1"; exit 9; }
nap() { sleep "$1" 2>/dev/null || sleep 1; }
size() { stat -L -c %s -- "$1" 2>/dev/null || wc -c < "$1"; }
sum() { if command -v sha256sum >/dev/null; then sha256sum < "$1" | cut -d' ' -f1; else echo -; fi; }
piece() { tail -c "+$(($2 + 1))" -- "$1" | head -c "$3"; }
"""


def framed(script: str, mark: str, data: bytes, *, by_input: bool) -> str:
    """Return `script` with its output between marks, so that a truncated answer is detected. In it, `data` prints
    `data`: from standard input, which may never be closed, or from the script text."""
    source = f"head -c {len(data)}" if by_input else f"printf {quote(_octal(data))}"
    return (
        f'trap \'r=$?; trap - EXIT; printf "\\n{mark}>%d\\n" "$r"\' EXIT\n'
        f"{PRELUDE}data() {{ {source if data else ':'}; }}\nprintf '\\n{mark}<\\n'\n{script}\n"
    )


def _octal(data: bytes) -> str:
    """Escape bytes for printf, so that no decoding program is needed."""
    return re.sub(rb"[^A-Za-z0-9 \n_./:=,@-]", lambda found: b"\\%03o" % found[0][0], data).decode()


def command_text(argv: Sequence[str], env: Mapping[str, str], cwd: str, home: str, mark: str, *, keep_env: bool) -> str:
    """Return a script that becomes the command. `keep_env` keeps what the sandbox's image set."""
    words = ["env", *([] if keep_env else ["-i"]), '"PATH=$PATH"', quote(f"HOME={home}"), "LANG=C.UTF-8", quote(mark)]
    words += [quote(f"{name}={value}") for name, value in env.items()]
    if "=" in argv[0] or argv[0].startswith("-"):  # env would take it as its own argument
        words += ["sh", "-c", quote('exec "$0" "$@"')]
    words += [quote(word) for word in argv]
    return f"cd {quote(cwd)} || exit 126\nexec {' '.join(words)}\n"


# The supervisor of a command. $1: its directory, $2: the user who runs it.
_RUN = r"""
d=$1 user=$2
exec 2> "$d/told"
read -r st < "/proc/$$/stat"
set -- ${st##*\) }
echo "$$ ${20}" > "$d/pid.new" && mv -f "$d/pid.new" "$d/pid"
ooms() {
  for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r "$f" ] && sed -n 's/^oom_kill //p' "$f" && return
  done
}
feed() {
  n=0
  while :; do
    if [ -e "$d/in.$n" ]; then
      cat "$d/in.$n" || exit
      rm -f "$d/in.$n"
      n=$((n + 1))
    elif [ -e "$d/in.end" ] && [ "$n" -ge "$(cat "$d/in.end")" ]; then exit
    else sleep 0.05 2> /dev/null || sleep 1; fi
  done
}
become() {
  if [ -z "$user" ] || [ "$user" = "$(id -u)" ] || [ "$user" = "$(id -un)" ]; then exec sh "$d/command"; fi
  chown "$user" "$d/command" 2> /dev/null
  group=$(id -g "$user" 2> /dev/null) || group=$user
  if setpriv --reuid "$user" --regid "$group" --clear-groups true 2> /dev/null; then
    if setpriv --reuid "$user" --regid "$group" --init-groups true 2> /dev/null; then groups=init; else groups=clear; fi
    exec setpriv --reuid "$user" --regid "$group" "--$groups-groups" sh "$d/command"
  fi
  if ! id -u "$user" > /dev/null 2>&1; then echo "there is no user $user here" >&2; exit 126; fi
  exec su -s /bin/sh "$(id -un "$user")" -c "exec sh $d/command"
}
in=/dev/null feeder=
if [ -e "$d/fed" ]; then
  mkfifo "$d/in"
  feed > "$d/in" &
  feeder=$! in=$d/in
fi
before=$(ooms)
( become ) < "$in" > "$d/stdout" 2> "$d/stderr"
code=$? how=exited limit=
[ -z "$feeder" ] || kill -9 "$feeder"
[ "$(ooms)" = "$before" ] || limit=memory
# A shell tells of a signal on its standard error, and so of none when the command ended itself with such a code.
if [ "$code" -gt 128 ] && { [ -s "$d/told" ] || [ "$code" = 141 ]; }; then how=signalled; fi
echo "$code $how $limit" > "$d/status.new" && mv -f "$d/status.new" "$d/status"
"""


def start(directory: str, user: str, mark: str, *, fed: bool, inline: bool) -> str:
    """Start a command in a session of its own, unless it was started. Fails with ENOUSER if we may not become that
    user.

    `inline` says that `data` is the command's text; else it is there already. `fed` says that standard input will come.
    """
    return f"""
d={quote(directory)} user={quote(user)}
if [ -n "$user" ] && [ "$(id -u)" != 0 ] && [ "$user" != "$(id -u)" ] && [ "$user" != "$(id -un)" ]; then
  no ENOUSER
fi
if ! [ -d "$d/started" ]; then
  mkdir -p "$d" || no EACCES
  chmod 711 "$d" "${{d%/*}}"
  {'data > "$d/command.new" && mv -f "$d/command.new" "$d/command" || no ENOSPC' if inline else ":"}
  chmod 700 "$d/command"
  : > "$d/stdout"; : > "$d/stderr"; {': > "$d/fed"' if fed else ":"}
  if mkdir "$d/started" 2> /dev/null; then
    session=; if command -v setsid > /dev/null; then session=setsid; fi
    env {quote(mark)} $session sh -c {quote(_RUN)} rollout "$d" "$user" < /dev/null > /dev/null 2>&1 &
  fi
fi
"""


def poll(directory: str, out: int, err: int, wait_s: float, most: int) -> str:
    """Wait for output beyond these offsets, or for the end. Prints a line "SIZE SIZE COUNT COUNT STATUS..." and then
    COUNT bytes of each. STATUS is `lost` if the supervisor is gone without a status."""
    return f"""
d={quote(directory)} o={out} e={err} most={most} left={int(wait_s * 1000)} tries=0
while :; do
  s=
  if [ -e "$d/status" ]; then s=$(cat "$d/status")
  elif [ -e "$d/pid" ]; then
    read -r p began < "$d/pid"
    st=; {{ read -r st < "/proc/$p/stat"; }} 2> /dev/null
    set -- ${{st##*\\) }}
    if [ -z "$st" ] || [ "$1" = Z ] || [ "$1" = X ] || [ "${{20}}" != "$began" ]; then
      s=$(cat "$d/status" 2> /dev/null) || s=lost
    fi
  elif ! [ -d "$d/started" ] || [ "$tries" -gt 100 ]; then s=lost
  fi
  a=$(size "$d/stdout" 2> /dev/null) || a=0
  b=$(size "$d/stderr" 2> /dev/null) || b=0
  if [ -n "$s" ] || [ "$a" -gt "$o" ] || [ "$b" -gt "$e" ] || [ "$left" -le 0 ]; then break; fi
  tries=$((tries + 1))
  if [ "$tries" -lt 20 ]; then nap 0.03; left=$((left - 30)); else nap 0.2; left=$((left - 200)); fi
done
na=$((a - o)) nb=$((b - e))
[ "$na" -le "$most" ] || na=$most
[ "$na" -ge 0 ] || na=0
[ "$nb" -le "$((most - na))" ] || nb=$((most - na))
[ "$nb" -ge 0 ] || nb=0
echo "$a $b $na $nb $s"
[ "$na" -eq 0 ] || piece "$d/stdout" "$o" "$na"
[ "$nb" -eq 0 ] || piece "$d/stderr" "$e" "$nb"
"""


def feed(directory: str, number: int, size: int, ahead: int) -> str:
    """Accept `data` as a piece of a command's standard input. Prints `later` while `ahead` pieces wait to be read."""
    return f"""
d={quote(directory)}
n=0; while [ -e "$d/in.{number - ahead}" ] && [ "$n" -lt 50 ]; do nap 0.1; n=$((n + 1)); done
if [ -e "$d/in.{number - ahead}" ]; then printf later; exit 0; fi
data > "$d/new.$$" && [ "$(size "$d/new.$$")" -eq {size} ] || no ENOSPC
if mkdir "$d/had.{number}" 2> /dev/null; then mv -f "$d/new.$$" "$d/in.{number}"; else rm -f "$d/new.$$"; fi
"""


def end_feed(directory: str, count: int) -> str:
    return f'd={quote(directory)}; echo {count} > "$d/in.last" && mv -f "$d/in.last" "$d/in.end"'


_ANCESTORS = r"""
p=$$
while [ "$p" -gt 1 ]; do
  spared="$spared$p "
  st=; { read -r st < "/proc/$p/stat"; } 2> /dev/null
  [ -n "$st" ] || break
  set -- ${st##*\) }
  p=$2
done
"""
_LOOK_AROUND = r"""
left=
for f in /proc/[0-9]*; do
  p=${f#/proc/}
  [ "$p" != 1 ] || continue
  case $spared in *" $p "*) continue;; esac
  st=; { read -r st < "$f/stat"; } 2> /dev/null
  [ -n "$st" ] || continue
  [ -z "$ours" ] || case $st in *"(sleep) "?" 1 "*) continue;; esac
  set -- ${st##*\) }
  if [ "$1" != Z ] && [ "$1" != X ]; then left="$left $p"; fi
done
"""

LIST = f'spared=" " ours=\n{_ANCESTORS}{_LOOK_AROUND}'
"""Script that sets `left` to all processes of the pid namespace but its first, this one and its ancestors."""

KILL_ALL = rf"""
spared=" $old " left=
{_ANCESTORS}
n=0
while :; do
  if [ "$verify" = 1 ]; then :
  elif [ -z "$old" ]; then kill -9 -1 2> /dev/null
  elif [ -n "$left" ]; then kill -9 $left 2> /dev/null
  fi
{_LOOK_AROUND}
  [ -n "$left" ] || exit 0
  n=$((n + 1))
  if [ "$n" -gt 200 ] || [ "$verify" = 1 ]; then printf %s "$left"; exit 1; fi
  [ "$n" -lt 20 ] || nap 0.02
done
"""
"""Script that kills every process that LIST finds except those in `old`, all at once if `old` is empty. With verify=1
it reports what is left. With ours=1, the first process is ours and keeps a `sleep`."""


def kill_marked(mark: str) -> str:
    """Kill the processes that carry the mark in their environment, and all their descendants."""
    return f"""
m={quote(mark)} n=0
marked() {{
  if printf 'x\\0y\\0' | grep -q -z -x y 2> /dev/null; then
    grep -l -z -x -F -- "$m" /proc/[0-9]*/environ 2> /dev/null
  else
    for f in /proc/[0-9]*/environ; do ! tr '\\0' '\\n' < "$f" 2> /dev/null | grep -q -x -F -- "$m" || echo "$f"; done
  fi
}}
while :; do
  found=" "
  for f in $(marked); do f=${{f#/proc/}}; found="$found${{f%/environ}} "; done
  [ "$found" != " " ] || exit 0
  grown=1
  while [ -n "$grown" ]; do
    grown=
    for f in /proc/[0-9]*; do
      p=${{f#/proc/}}
      case $found in *" $p "*) continue;; esac
      st=; {{ read -r st < "$f/stat"; }} 2> /dev/null
      [ -n "$st" ] || continue
      set -- ${{st##*\\) }}
      case $found in *" $2 "*) found="$found$p "; grown=1;; esac
    done
  done
  kill -9 $found 2> /dev/null
  n=$((n + 1))
  if [ "$n" -gt 100 ]; then printf %s "$found"; exit 1; fi
  nap 0.02
done
"""


def put(path: str, number: int, size: int) -> str:
    """Accept `data` as a piece of a file in transit."""
    return f"""
t={quote(path)}
[ -d "${{t%/*}}" ] || mkdir -p "${{t%/*}}" || no EACCES
if ! [ -e "$t.{number}" ]; then
  data > "$t.new.$$" 2> /dev/null && [ "$(size "$t.new.$$")" -eq {size} ] || no ENOSPC
  mv -f "$t.new.$$" "$t.{number}"
fi
"""


def join(path: str, count: int, digest: str) -> str:
    """Join the pieces of a file and check its digest."""
    return f"""
t={quote(path)}
n=0; while [ "$n" -lt {count} ] && cat "$t.$n" 2> /dev/null; do n=$((n + 1)); done > "$t.new.$$"
if [ "$n" -eq {count} ] && mv -f "$t.new.$$" "$t"; then
  n=0; while [ "$n" -lt {count} ]; do rm -f "$t.$n"; n=$((n + 1)); done
fi
rm -f "$t.new.$$"
[ -e "$t" ] || no ENOSPC
found=$(sum "$t"); [ "$found" = - ] || [ "$found" = {digest} ] || no EIO
"""


_LOOK = r"""
if ! [ -e "$p" ]; then
  if [ -L "$p" ] && ! readlink -f "$p" > /dev/null 2>&1; then no ELOOP; fi
  q=$p
  while [ "$q" != "${q%/*}" ] && [ -n "${q%/*}" ]; do
    q=${q%/*}
    if [ -e "$q" ]; then
      [ -d "$q" ] || no ENOTDIR
      [ -x "$q" ] || no EACCES
      break
    fi
  done
  no ENOENT
fi
"""


def read(path: str, spool: str, max_bytes: int, most: int) -> str:
    """Print a line "SIZE MODE SUM", then the file's bytes if they are at most `most`; else leave them in `spool`."""
    return f"""
p={quote(path)} t={quote(spool)}
{_LOOK}
[ ! -d "$p" ] || no EISDIR
[ -f "$p" ] || no EINVAL
[ -r "$p" ] || no EACCES
[ "$(size "$p")" -le {max_bytes} ] || no too_large
m=$(stat -L -c %a -- "$p" 2> /dev/null) || m=644
mkdir -p "${{t%/*}}"
cat -- "$p" > "$t.$$" || no EIO
s=$(size "$t.$$")
if [ "$s" -le {most} ]; then
  echo "$s $m -"; cat "$t.$$"; rm -f "$t.$$"
else
  mv -f "$t.$$" "$t"; echo "$s $m $(sum "$t")"
fi
"""


def get(spool: str, offset: int, count: int) -> str:
    return f"piece {quote(spool)} {offset} {count}"


def place_file(spool: str, path: str, mode: int, *, inline: bool) -> str:
    """Put `spool`'s contents, or `data`, at `path` atomically; a link there is replaced too."""
    return f"""
p={quote(path)} t={quote(spool)}
[ ! -d "$p" ] || no EISDIR
q=${{p%/*}}
if ! mkdir -p -- "${{q:-/}}" 2> /dev/null; then
  while [ -n "$q" ]; do
    if [ -e "$q" ] && [ ! -d "$q" ]; then no ENOTDIR; fi
    q=${{q%/*}}
  done
  no EACCES
fi
new="${{q:-/}}/.new-${{t##*-}}.$$"
{"data" if inline else 'cat "$t"'} > "$new" 2> /dev/null || {{
  rm -f "$new"; [ -w "${{q:-/}}" ] || no EACCES; no ENOSPC
}}
chmod {mode:o} "$new" && mv -f -- "$new" "$p" || {{ rm -f "$new"; no EACCES; }}
"""


_CHOOSE = r"""
cd "$p" || no EACCES
find . ! -name . \( {names} \) -prune -print 2> /dev/null > "$t.ignored"
find . ! -name . \( {names} \) -prune -o -type f -size +{bytes}c -print 2> /dev/null > "$t.large"
cat "$t.ignored" "$t.large" | sed 's/[*?[\\]/\\&/g' > "$t.exclude"
cd /
"""
_CHOSEN = """
{
  head -n 500 "$t.ignored" | sed 's/^/=ignored /'
  head -n 500 "$t.large" | sed 's/^/=file_too_large /'
} | head -c 500000
echo; echo "=count $(cat "$t.ignored" "$t.large" | wc -l)"
"""


def pack(path: str, spool: str, max_bytes: int, ignore: Sequence[str] = (), file_bytes: int | None = None) -> str:
    """Pack the directory into `spool`. Prints "file" for a file; else a line "SIZE SUM" and tar's messages.

    `ignore` has name patterns, at any depth, to leave out; files beyond `file_bytes` are left out too. With the latter
    it also prints what was left out, in lines "=WHY ./PATH", and their number, as "=count N".
    """
    choose = f'[ -z "$(find "$p" -type f -size +{max_bytes}c 2> /dev/null | head -n 1)" ] || no too_large'
    options = no_link = chosen = ""
    if file_bytes is not None:
        names = " -o ".join(f"-name {quote(pattern)}" for pattern in ignore) or "-name ''"
        choose, chosen = _CHOOSE.format(names=names, bytes=file_bytes), _CHOSEN
        options, no_link = '-X "$t.exclude"', '[ ! -L "$p" ] || no ELOOP'
    return f"""
p={quote(path)} t={quote(spool)}
{no_link}
{_LOOK}
if [ -f "$p" ]; then printf file; exit 0; fi
[ -d "$p" ] || no EINVAL
[ -r "$p" ] && [ -x "$p" ] || no EACCES
command -v tar > /dev/null || no ENOTAR
mkdir -p "${{t%/*}}"
{choose}
(cd "$p" && tar -cf - {options} . 2> "$t.said.$$") | head -c {3 * max_bytes + (1 << 20)} > "$t.$$" || no ENOSPC
mv -f "$t.$$" "$t"
echo "$(size "$t") $(sum "$t")"
head -c 2000 "$t.said.$$"; rm -f "$t.said.$$"
{chosen}
"""


def unpack(spool: str, path: str) -> str:
    """Unpack the archive in `spool` into a directory, but through no link and over nothing of another kind."""
    return f"""
p={quote(path)} t={quote(spool)}
command -v tar > /dev/null || no ENOTAR
if [ -e "$p" ] && [ ! -d "$p" ]; then no ENOTDIR; fi
n="$t.$$"
mkdir -p "$n" && tar -xpf "$t" -C "$n" > /dev/null 2>&1 || {{ rm -rf "$n"; no ENOSPC; }}
export p
found=$(cd "$n" && find . ! -name . -exec sh -c '
  for f; do
    if [ -d "$f" ] && [ ! -L "$f" ]; then
      if [ -L "$p/$f" ]; then echo ELOOP
      elif [ -e "$p/$f" ] && [ ! -d "$p/$f" ]; then echo ENOTDIR; fi
    elif [ -d "$p/$f" ] && [ ! -L "$p/$f" ]; then echo EISDIR; fi
  done' sh {{}} + | head -n 1)
[ -z "$found" ] || {{ rm -rf "$n"; no "$found"; }}
mkdir -p -- "$p" 2> /dev/null || {{ rm -rf "$n"; no ENOTDIR; }}
(cd "$n" && tar -cf - .) | (cd "$p" && tar -xpf - > /dev/null 2>&1) || {{ rm -rf "$n"; no ENOSPC; }}
rm -rf "$n"
"""


def remove(paths: Sequence[str]) -> str:
    return f"rm -rf {' '.join(map(quote, paths))}" if paths else ":"

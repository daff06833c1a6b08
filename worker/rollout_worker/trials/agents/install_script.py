"""Installs a coding CLI in a sandbox: a script for /bin/sh that puts everything below one directory.

The directory has the same path in every sandbox, so that an installation can be unpacked in another, including absolute
paths. Root is needed only to install curl, if an image has no program for downloads.
"""

from __future__ import annotations

import shlex

from rollout_worker.trials.agents.coding_clis import CodingCli

ROOT = "/tmp/.rollout-agents"
NODE_VERSION = "22.21.1"
"""The version to download if the image has no Node.js of at least NODE_MAJOR."""
NODE_MAJOR = 20

_BEGIN = r"""set -eu
export AGENT={prefix}
mkdir -p "$AGENT/bin"
export PATH="$AGENT/bin:$PATH"
has() { command -v "$1" >/dev/null 2>&1; }
as_root() {
  [ "$(id -u)" = 0 ] || { echo "this image lacks $1, and only root can install it: add it to the image" >&2; exit 1; }
  if has apt-get; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"
  elif has apk; then apk add --no-cache "$@"
  elif has dnf; then dnf install -y -q "$@"
  elif has yum; then yum install -y -q "$@"
  else echo "this image has neither $1 nor a package manager that is known" >&2; exit 1; fi
}
fetch() {
  has curl || has wget || has python3 || as_root curl ca-certificates
  if has curl; then curl -fsSL --retry 3 "$1" -o "$2"
  elif has wget; then wget -q "$1" -O "$2"
  else python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' "$1" "$2"; fi
}
"""

_NPM = r"""node_is_new() { has node && has npm && [ "$(node -p 'process.versions.node.split(".")[0]')" -ge {major} ]; }
if ! node_is_new; then
  if [ -f /etc/alpine-release ]; then as_root nodejs npm
  else
    case "$(uname -m)" in x86_64) arch=x64 ;; aarch64 | arm64) arch=arm64 ;; *) arch="$(uname -m)" ;; esac
    fetch "https://nodejs.org/dist/v{node}/node-v{node}-linux-$arch.tar.gz" "$AGENT/node.tar.gz"
    mkdir -p "$AGENT/node"
    tar -xzf "$AGENT/node.tar.gz" -C "$AGENT/node" --strip-components=1
    rm "$AGENT/node.tar.gz"
    for one in node npm npx; do ln -sf "../node/bin/$one" "$AGENT/bin/$one"; done
  fi
fi
# --prefix would look for the image's own settings, such as a registry, below the prefix.
export NPM_CONFIG_GLOBALCONFIG="$(npm config get globalconfig)"
npm install --global --prefix "$AGENT" --cache "$AGENT/cache" --no-fund --no-audit --no-update-notifier \
  --loglevel=error {package}
rm -rf "$AGENT/cache"
"""

_PYPI = r"""if has uv || {{ fetch https://astral.sh/uv/install.sh "$AGENT/uv.sh" &&
    UV_INSTALL_DIR="$AGENT/bin" UV_NO_MODIFY_PATH=1 sh "$AGENT/uv.sh" --quiet; }}; then
  export UV_TOOL_DIR="$AGENT/tools" UV_TOOL_BIN_DIR="$AGENT/bin" UV_PYTHON_INSTALL_DIR="$AGENT/python"
  UV_CACHE_DIR="$AGENT/cache" uv tool install --quiet --python {python} {package}
else
  has python3 || as_root python3 python3-venv
  python3 -m venv "$AGENT/venv"
  "$AGENT/venv/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check {package}
  ln -sf "../venv/bin/{program}" "$AGENT/bin/{program}"
fi
rm -rf "$AGENT/cache" "$AGENT/uv.sh"
"""

_SCRIPT = r"""has curl || as_root curl ca-certificates
has bzip2 || as_root bzip2
fetch {package} "$AGENT/install.sh"
{version}GOOSE_BIN_DIR="$AGENT/bin" CONFIGURE=false bash "$AGENT/install.sh"
rm "$AGENT/install.sh"
"""

_END = r"""chmod -R a+rX "$AGENT"
"$AGENT/bin/{program}" {version} </dev/null
"""


def prefix_of(cli: CodingCli) -> str:
    """Return its directory in every sandbox."""
    return f"{ROOT}/{cli.name}"


def install_script(cli: CodingCli, version: str | None) -> str:
    """Return the script, which ends by printing the version. None means the newest version."""
    begin = _BEGIN.replace("{prefix}", shlex.quote(prefix_of(cli)))
    end = _END.replace("{program}", cli.program).replace("{version}", shlex.join(cli.version_args))
    return begin + _middle(cli, version) + end


def _middle(cli: CodingCli, version: str | None) -> str:
    if cli.source == "npm":
        package = shlex.quote(f"{cli.package}@{version or 'latest'}")
        return _NPM.replace("{major}", str(NODE_MAJOR)).replace("{node}", NODE_VERSION).replace("{package}", package)
    if cli.source == "pypi":
        package = shlex.quote(f"{cli.package}=={version}" if version else cli.package)
        return _PYPI.format(package=package, python=cli.python, program=cli.program)
    of_version = f"GOOSE_VERSION=v{version.removeprefix('v')} " if version else ""
    return _SCRIPT.format(package=shlex.quote(cli.package), version=of_version)

"""The supported coding CLIs: where each is from, how it runs without a user, and what it prints.

Flags and formats are those of the versions named in docs/agents.md. `coding_cli.py` carries out an entry of this table,
and `cli_usage.py` reads what a program prints about tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollout_worker.trials.agents import cli_usage
from rollout_worker.trials.agents.cli_usage import Read

_OF_PROVIDERS: dict[str, tuple[str, ...]] = {
    "anthropic": ("ANTHROPIC_API_KEY",),
    "openai": ("OPENAI_API_KEY",),
    "gemini": ("GEMINI_API_KEY",),
    "google": ("GOOGLE_API_KEY", "GEMINI_API_KEY"),
    "openrouter": ("OPENROUTER_API_KEY",),
    "deepseek": ("DEEPSEEK_API_KEY",),
    "groq": ("GROQ_API_KEY",),
    "mistral": ("MISTRAL_API_KEY",),
    "xai": ("XAI_API_KEY",),
}
"""Variables for the key of a service, by the provider before the slash of a model's name. A program accepts any of
them; `api_key_env` sets the first."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The model, without a provider that the program knows by itself, and the service."""

    model: str
    provider: str
    base_url: str
    key_name: str


def _nothing(asked: Asked) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class CodingCli:
    """`package` is of the registry `source`; for a script it is the address. `{model}` and `{base_url}` of the
    arguments are filled in, those of `model_args` and `base_url_args` only if there is one. The instruction goes to
    standard input, or after the arguments, preceded by `before_instruction`. `keys` are variables by provider, "" for
    any; `also_keys` are others in which users have the same key, copied to the first. `prepare` is a line of shell
    before the program. `output` is a file in /logs/agent that the program writes, if it does not print its usage.
    `version_args` make it print its version first."""

    name: str
    source: Literal["npm", "pypi", "script"]
    package: str
    program: str
    args: Sequence[str]
    read: Callable[[Read], None]
    instruction: Literal["stdin", "argument", "file"] = "stdin"
    before_instruction: Sequence[str] = ()
    model_args: Sequence[str] = ()
    base_url_args: Sequence[str] = ()
    own_providers: Sequence[str] = ()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _OF_PROVIDERS)
    also_keys: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    more_env: Callable[[Asked], Mapping[str, str]] = _nothing
    prepare: str = ""
    output: str = ""
    version_args: Sequence[str] = ("--version",)
    python: str = "3.12"


def _with_base_url(**variables: str) -> Callable[[Asked], Mapping[str, str]]:
    """Return a function that sets variables if there is a base_url, with `{base_url}` and `{model}` filled in."""

    def of(asked: Asked) -> Mapping[str, str]:
        if not asked.base_url:
            return {}
        return {name: value.format(base_url=asked.base_url, model=asked.model) for name, value in variables.items()}

    return of


def _litellm(asked: Asked) -> Mapping[str, str]:
    if not asked.base_url:
        return {}
    name = {"anthropic": "ANTHROPIC_API_BASE", "gemini": "GEMINI_API_BASE"}.get(asked.provider, "OPENAI_API_BASE")
    return {name: asked.base_url}


def _opencode(asked: Asked) -> Mapping[str, str]:
    """Configure a model behind a base_url, which OpenCode does not know."""
    if not asked.base_url:
        return {}
    name = asked.model.partition("/")[2]
    options = {"baseURL": asked.base_url, "apiKey": f"{{env:{asked.key_name}}}"}
    provider: dict[str, object] = {"options": options, "models": {name: {}}}
    if asked.provider not in ("anthropic", "openai", "google"):
        provider["npm"] = "@ai-sdk/openai-compatible"
    return {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {asked.provider: provider}})}


def _goose(asked: Asked) -> Mapping[str, str]:
    variables = {"GOOSE_PROVIDER": asked.provider, "GOOSE_MODEL": asked.model.partition("/")[2] or asked.model}
    if asked.base_url:
        host = {"anthropic": "ANTHROPIC_HOST", "google": "GOOGLE_HOST"}.get(asked.provider, "OPENAI_HOST")
        address = asked.base_url.rstrip("/")
        variables[host] = address.removesuffix("/v1") if host == "OPENAI_HOST" else address
    return variables


def _openhands(asked: Asked) -> Mapping[str, str]:
    return {"LLM_MODEL": asked.model} | ({"LLM_BASE_URL": asked.base_url} if asked.base_url else {})


_ALL = (
    CodingCli(
        name="claude-code", source="npm", package="@anthropic-ai/claude-code", program="claude",
        args=("--print", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
        model_args=("--model", "{model}"), own_providers=("anthropic",),
        keys={"": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN")},
        # Without IS_SANDBOX it refuses to skip permissions as root.
        env={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
        more_env=_with_base_url(ANTHROPIC_BASE_URL="{base_url}"), read=cli_usage.claude_code,
    ),
    CodingCli(
        name="codex", source="npm", package="@openai/codex", program="codex",
        args=("exec", "--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"),
        model_args=("--model", "{model}"), own_providers=("openai",),
        # A provider of its own: with `openai_base_url` it tries web sockets first, five times.
        base_url_args=(
            "-c", 'model_provider="rollout"', "-c",
            'model_providers.rollout={{name="rollout",base_url="{base_url}",env_key="CODEX_API_KEY",'
            'wire_api="responses"}}',
        ),
        before_instruction=("-",), keys={"": ("CODEX_API_KEY",)}, also_keys=("OPENAI_API_KEY",), read=cli_usage.codex,
    ),
    CodingCli(
        name="gemini-cli", source="npm", package="@google/gemini-cli", program="gemini",
        args=("--yolo", "--skip-trust", "--output-format", "stream-json"), model_args=("--model", "{model}"),
        own_providers=("google", "gemini"), keys={"": ("GEMINI_API_KEY", "GOOGLE_API_KEY")},
        # Told nothing, it takes a base_url for a gateway of Google's.
        env={"GEMINI_CLI_TRUST_WORKSPACE": "true"},
        prepare="""[ -e ~/.gemini/settings.json ] || { mkdir -p ~/.gemini
  echo '{"security":{"auth":{"selectedType":"gemini-api-key"}}}' >~/.gemini/settings.json; }""",
        more_env=_with_base_url(GOOGLE_GEMINI_BASE_URL="{base_url}"), read=cli_usage.gemini_cli,
    ),
    CodingCli(
        name="qwen-code", source="npm", package="@qwen-code/qwen-code", program="qwen",
        args=("--yolo", "--output-format", "stream-json", "--auth-type", "openai"), model_args=("--model", "{model}"),
        own_providers=("openai", "qwen"), keys={"": ("OPENAI_API_KEY",)},
        more_env=_with_base_url(OPENAI_BASE_URL="{base_url}"), read=cli_usage.qwen_code,
    ),
    CodingCli(
        name="opencode", source="npm", package="opencode-ai", program="opencode",
        args=("run", "--format", "json", "--auto"), model_args=("--model", "{model}"),
        keys={**_OF_PROVIDERS, "google": ("GOOGLE_GENERATIVE_AI_API_KEY",)},
        env={"OPENCODE_DISABLE_AUTOUPDATE": "1"}, more_env=_opencode, read=cli_usage.opencode,
    ),
    CodingCli(
        name="aider", source="pypi", package="aider-chat", program="aider", instruction="file",
        args=(
            "--yes-always", "--no-pretty", "--no-stream", "--no-check-update", "--no-show-release-notes",
            "--no-show-model-warnings", "--no-gitignore", "--analytics-disable", "--no-suggest-shell-commands",
            "--chat-history-file", "/logs/agent/aider.chat.history.md", "--input-history-file", "/dev/null",
        ),
        before_instruction=("--message-file",), model_args=("--model", "{model}"), more_env=_litellm,
        read=cli_usage.aider,
    ),
    CodingCli(
        name="goose", source="script", program="goose",
        package="https://github.com/block/goose/releases/download/stable/download_cli.sh",
        args=("run", "--no-session", "--quiet", "--output-format", "stream-json"), instruction="file",
        before_instruction=("--instructions",), env={"GOOSE_MODE": "auto", "GOOSE_DISABLE_KEYRING": "1"},
        more_env=_goose, read=cli_usage.goose,
    ),
    CodingCli(
        name="mini-swe-agent", source="pypi", package="mini-swe-agent", program="mini", instruction="argument",
        args=("--yolo", "--exit-immediately", "--cost-limit", "0", "--output", "{output}", "-c", "mini"),
        model_args=("--model", "{model}"), base_url_args=("-c", "model.model_kwargs.api_base={base_url}"),
        before_instruction=("--task",),
        env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        output="mini-swe-agent.traj.json", version_args=("--help",), read=cli_usage.mini_swe_agent,
    ),
    CodingCli(
        name="openhands", source="pypi", package="openhands", program="openhands", instruction="file",
        args=("--headless", "--json", "--override-with-envs"), before_instruction=("--file",),
        keys={"": ("LLM_API_KEY",)}, env={"OPENHANDS_SUPPRESS_BANNER": "1"}, more_env=_openhands,
        read=cli_usage.openhands,
    ),
)  # fmt: skip

CLIS: dict[str, CodingCli] = {cli.name: cli for cli in _ALL}

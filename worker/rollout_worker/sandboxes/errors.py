"""What can go wrong with a sandbox, told apart by what the caller can do about it.

A command that fails is no error of the sandbox: `Sandbox.exec` returns how it ended. `Finished.check` raises for
callers that want it so.
"""

from __future__ import annotations

from rollout.model.errors import RolloutError


class SandboxError(RolloutError):
    """Something about a sandbox went wrong."""

    code = "sandbox"


class SandboxRefusedError(SandboxError):
    """The provider cannot keep what was asked for. `context["reasons"]`: each of them, a sentence."""

    code = "sandbox_refused"


class SandboxCreateError(SandboxError):
    """The sandbox could not be made."""

    code = "sandbox_create"
    retryable = True


class SandboxNoRoomError(SandboxCreateError):
    """There is no room at present for what the sandbox declares."""

    code = "sandbox_no_room"


class SandboxGoneError(SandboxError):
    """The sandbox is not there any more: what ran in it is lost, and the command did not fail by itself."""

    code = "sandbox_gone"
    retryable = True


class SandboxEndedError(SandboxGoneError):
    """The sandbox ended by what ran in it: nobody outside ended it, and its host and provider are well."""

    code = "sandbox_ended"


class SandboxProviderError(SandboxError):
    """The provider's own service failed, and the sandbox may be well."""

    code = "sandbox_provider"
    retryable = True


class SandboxFileError(SandboxError):
    """A file of the sandbox could not be read or written. `context["reason"]`: an errno's name, or `too_large`."""

    code = "sandbox_file"


class SandboxTeardownError(SandboxError):
    """Something of a sandbox is left behind. Its claim stays, so that whoever starts next tries again."""

    code = "sandbox_teardown"
    retryable = True


class CommandFailedError(SandboxError):
    """The command did not end with exit code 0. `context["finished"]` says how it did."""

    code = "command_failed"


class ImageError(SandboxError):
    """What a sandbox is to begin with could not be had."""

    code = "image"


class ImageBuildError(ImageError):
    """An image could not be built. The message has the end of what the build printed."""

    code = "image_build"


class ImageBuildTimeoutError(ImageBuildError):
    """The build of an image did not end in time."""

    code = "image_build_timeout"


class ImagePullError(ImageError):
    """An image could not be fetched."""

    code = "image_pull"
    retryable = True


class ImageNotFoundError(ImagePullError):
    """There is no such image, or this machine may not have it: trying again does not help."""

    code = "image_not_found"
    retryable = False


class RegistryUnreachableError(ImagePullError):
    """The registry does not answer."""

    code = "registry_unreachable"


class ImageToolsMissingError(ImageError):
    """This host lacks the programs that fetch, unpack or build images."""

    code = "image_tools_missing"

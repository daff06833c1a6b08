"""Errors of sandboxes, distinguished by what the caller can do about them.

A command that fails is no error of the sandbox: `Sandbox.exec` returns how it ended. `Finished.check` raises for
callers that want an exception.
"""

from __future__ import annotations

from rollout.model.errors import RolloutError


class SandboxError(RolloutError):
    """An error of a sandbox."""

    code = "sandbox"


class SandboxRefusedError(SandboxError):
    """The provider cannot satisfy the specification. `context["reasons"]` has a sentence for each reason."""

    code = "sandbox_refused"


class SandboxCreateError(SandboxError):
    """The sandbox could not be created."""

    code = "sandbox_create"
    retryable = True


class SandboxNoRoomError(SandboxCreateError):
    """There is currently no room for what the sandbox declares."""

    code = "sandbox_no_room"


class SandboxGoneError(SandboxError):
    """The sandbox no longer exists: what ran in it is lost, and the command did not fail by itself."""

    code = "sandbox_gone"
    retryable = True


class SandboxEndedError(SandboxGoneError):
    """What ran in the sandbox ended it: nobody outside did, and its host and provider work."""

    code = "sandbox_ended"


class SandboxProviderError(SandboxError):
    """The provider's own service failed; the sandbox may still run."""

    code = "sandbox_provider"
    retryable = True


class SandboxFileError(SandboxError):
    """A file of the sandbox could not be read or written. `context["reason"]` is an errno's name or `too_large`."""

    code = "sandbox_file"


class SandboxTeardownError(SandboxError):
    """Part of a sandbox could not be removed. Its claim stays, so that the next owner tries again."""

    code = "sandbox_teardown"
    retryable = True


class CommandFailedError(SandboxError):
    """A command did not end with exit code 0. `context["finished"]` has its result."""

    code = "command_failed"


class ImageError(SandboxError):
    """The image of a sandbox could not be obtained."""

    code = "image"


class ImageBuildError(ImageError):
    """An image could not be built. The message has the end of the build's output."""

    code = "image_build"


class ImageBuildTimeoutError(ImageBuildError):
    """The build of an image did not end in time."""

    code = "image_build_timeout"


class ImagePullError(ImageError):
    """An image could not be fetched."""

    code = "image_pull"
    retryable = True


class ImageNotFoundError(ImagePullError):
    """The image does not exist, or this machine has no access to it; a retry does not help."""

    code = "image_not_found"
    retryable = False


class RegistryUnreachableError(ImagePullError):
    """The registry does not answer."""

    code = "registry_unreachable"


class ImageToolsMissingError(ImageError):
    """This host lacks the programs that fetch, unpack or build images."""

    code = "image_tools_missing"

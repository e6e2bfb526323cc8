"""elsewhere: instant, disposable, isolated copies of the environment you work in.

The public names are loaded on first use: the hot path of the command line imports this package and must not pay for them.
"""

__version__ = "0.1.0"
__all__ = [
    "Background",
    "Changes",
    "CommandFailed",
    "CommandResult",
    "CommandUsage",
    "Denial",
    "ElsewhereError",
    "Entry",
    "Limits",
    "Sandbox",
    "SandboxFiles",
    "SandboxInfo",
    "Transferred",
    "Usage",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elsewhere.sdk import Background as Background
    from elsewhere.sdk import Changes as Changes
    from elsewhere.sdk import CommandFailed as CommandFailed
    from elsewhere.sdk import CommandResult as CommandResult
    from elsewhere.sdk import CommandUsage as CommandUsage
    from elsewhere.sdk import Denial as Denial
    from elsewhere.sdk import ElsewhereError as ElsewhereError
    from elsewhere.sdk import Entry as Entry
    from elsewhere.sdk import Limits as Limits
    from elsewhere.sdk import Sandbox as Sandbox
    from elsewhere.sdk import SandboxFiles as SandboxFiles
    from elsewhere.sdk import SandboxInfo as SandboxInfo
    from elsewhere.sdk import Transferred as Transferred
    from elsewhere.sdk import Usage as Usage


def __getattr__(name: str) -> object:
    if name in __all__:
        from elsewhere import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module 'elsewhere' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

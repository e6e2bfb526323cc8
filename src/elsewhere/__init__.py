"""elsewhere: instant, disposable, isolated copies of the environment you work in.

The public names are loaded on first use: the hot path of the command line imports this package and must not pay for them.
"""

__version__ = "0.1.0"
__all__ = [
    "Background",
    "Change",
    "Changes",
    "CommandFailed",
    "CommandResult",
    "CommandUsage",
    "Denial",
    "Drift",
    "ElsewhereError",
    "Entry",
    "FileStat",
    "Limits",
    "Package",
    "Sandbox",
    "SandboxFiles",
    "SandboxInfo",
    "Side",
    "Snapshot",
    "Transferred",
    "Usage",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elsewhere.sdk import Background as Background
    from elsewhere.sdk import Change as Change
    from elsewhere.sdk import Changes as Changes
    from elsewhere.sdk import CommandFailed as CommandFailed
    from elsewhere.sdk import CommandResult as CommandResult
    from elsewhere.sdk import CommandUsage as CommandUsage
    from elsewhere.sdk import Denial as Denial
    from elsewhere.sdk import Drift as Drift
    from elsewhere.sdk import ElsewhereError as ElsewhereError
    from elsewhere.sdk import Entry as Entry
    from elsewhere.sdk import FileStat as FileStat
    from elsewhere.sdk import Limits as Limits
    from elsewhere.sdk import Package as Package
    from elsewhere.sdk import Sandbox as Sandbox
    from elsewhere.sdk import SandboxFiles as SandboxFiles
    from elsewhere.sdk import SandboxInfo as SandboxInfo
    from elsewhere.sdk import Side as Side
    from elsewhere.sdk import Snapshot as Snapshot
    from elsewhere.sdk import Transferred as Transferred
    from elsewhere.sdk import Usage as Usage


def __getattr__(name: str) -> object:
    if name in __all__:
        from elsewhere import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module 'elsewhere' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

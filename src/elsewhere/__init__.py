"""elsewhere: instant, disposable, isolated copies of the environment you work in.

The public names are loaded on first use: the hot path of the command line imports this package and must not pay for them.
"""

__version__ = "0.1.0"
__all__ = [
    "Approach",
    "Background",
    "Budget",
    "Change",
    "Changes",
    "CheckFailed",
    "CommandFailed",
    "CommandResult",
    "CommandUsage",
    "Conflict",
    "Denial",
    "Drift",
    "ElsewhereError",
    "Entry",
    "Experiment",
    "FileStat",
    "Limits",
    "NoWinner",
    "Node",
    "Package",
    "Promotion",
    "Result",
    "Sandbox",
    "SandboxFiles",
    "SandboxInfo",
    "Side",
    "Snapshot",
    "Transferred",
    "Tree",
    "Usage",
    "explore",
    "promotions",
    "race",
    "undo",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elsewhere.sdk import Approach as Approach
    from elsewhere.sdk import Background as Background
    from elsewhere.sdk import Budget as Budget
    from elsewhere.sdk import Change as Change
    from elsewhere.sdk import Changes as Changes
    from elsewhere.sdk import CheckFailed as CheckFailed
    from elsewhere.sdk import CommandFailed as CommandFailed
    from elsewhere.sdk import CommandResult as CommandResult
    from elsewhere.sdk import CommandUsage as CommandUsage
    from elsewhere.sdk import Conflict as Conflict
    from elsewhere.sdk import Denial as Denial
    from elsewhere.sdk import Drift as Drift
    from elsewhere.sdk import ElsewhereError as ElsewhereError
    from elsewhere.sdk import Entry as Entry
    from elsewhere.sdk import Experiment as Experiment
    from elsewhere.sdk import FileStat as FileStat
    from elsewhere.sdk import Limits as Limits
    from elsewhere.sdk import Node as Node
    from elsewhere.sdk import NoWinner as NoWinner
    from elsewhere.sdk import Package as Package
    from elsewhere.sdk import Promotion as Promotion
    from elsewhere.sdk import Result as Result
    from elsewhere.sdk import Sandbox as Sandbox
    from elsewhere.sdk import SandboxFiles as SandboxFiles
    from elsewhere.sdk import SandboxInfo as SandboxInfo
    from elsewhere.sdk import Side as Side
    from elsewhere.sdk import Snapshot as Snapshot
    from elsewhere.sdk import Transferred as Transferred
    from elsewhere.sdk import Tree as Tree
    from elsewhere.sdk import Usage as Usage
    from elsewhere.sdk import explore as explore
    from elsewhere.sdk import promotions as promotions
    from elsewhere.sdk import race as race
    from elsewhere.sdk import undo as undo


def __getattr__(name: str) -> object:
    if name in __all__:
        from elsewhere import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module 'elsewhere' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

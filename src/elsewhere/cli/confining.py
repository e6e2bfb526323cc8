"""Options about what a sandbox may see, do and use up; each is a setting, too, and goes by that name."""

import argparse

__all__ = ["add_confinement", "settings_of"]

_OPTIONS = {
    "backend": "sandbox.backend",
    "view": "sandbox.view",
    "network": "sandbox.network",
    "allow": "network.allow",
    "deny": "network.deny",
    "preset": "network.preset",
    "forward": "network.forward",
    "publish": "network.publish",
    "untrusted": "sandbox.untrusted",
    "nested": "sandbox.nested",
    "best_effort": "sandbox.best_effort",
    "gpu": "sandbox.gpu",
    "hide": "sandbox.hide",
    "share": "sandbox.share",
    "profile": "sandbox.profile",
    "device": "sandbox.device",
    "memory": "limits.memory",
    "cpus": "limits.cpus",
    "pids": "limits.pids",
    "disk": "limits.disk",
    "open_files": "limits.open_files",
    "limit_timeout": "limits.timeout",
    "ttl": "limits.ttl",
    "idle": "limits.idle",
    "no_wait": "admission.wait",
}


def add_confinement(parser: argparse.ArgumentParser, *, lives: bool) -> None:
    """`lives`: it is for a sandbox that stays."""
    sight = parser.add_argument_group("what it may see and do")
    sight.add_argument(
        "--view", metavar="VIEW", help="machine (all but what is hidden; the default) or project (system, toolchains, project)"
    )
    sight.add_argument(
        "--untrusted",
        action="store_true",
        default=None,
        help="for code that nobody trusts: project view, no network, tight limits",
    )
    sight.add_argument(
        "--share", metavar="PATH[:rw]", action="append", help="show a place of reality as it is: read-only, or writable with :rw"
    )
    sight.add_argument(
        "--profile",
        metavar="NAME",
        action="append",
        help="what an agent program needs: claude, codex, gemini, opencode, aider, mini-swe-agent, or your own",
    )
    sight.add_argument("--hide", metavar="PATH", action="append", help="do not show this place; may be repeated")
    sight.add_argument("--device", metavar="PATH", action="append", help="a device of the host, such as /dev/kvm")
    sight.add_argument("--gpu", action="store_true", default=None, help="the host's NVIDIA devices")
    sight.add_argument("--nested", action="store_true", default=None, help="allow user namespaces inside")
    sight.add_argument("--backend", metavar="NAME", help="what makes the sandbox: auto (the default) or native")
    _add_network(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--memory", metavar="SIZE", help="of all its processes together: 512M, 2G, 50%%; default 80%% of the machine's"
    )
    limits.add_argument("--cpus", metavar="N", help="processors' worth of time: 1, 0.5")
    limits.add_argument("--pids", metavar="N", help="processes and threads at once; default 4096")
    limits.add_argument("--disk", metavar="SIZE", help="all that it writes: 1G; default 20G")
    limits.add_argument("--open-files", metavar="N", help="descriptors of one process")
    if lives:
        limits.add_argument("--timeout", dest="limit_timeout", metavar="TIME", help="of each command in it (5m)")
        limits.add_argument("--ttl", metavar="TIME", help="it ends by itself after this long (30m, 12h); default 24h")
        limits.add_argument("--idle", metavar="TIME", help="it ends by itself this long after its last command")
    limits.add_argument(
        "--best-effort", action="store_true", default=None, help="run even if this host cannot hold a limit that was asked for"
    )
    limits.add_argument("--no-wait", action="store_const", const=False, default=None, help="do not wait for room on the machine")


def _add_network(parser: argparse.ArgumentParser) -> None:
    network = parser.add_argument_group("network")
    network.add_argument(
        "--network",
        metavar="NETWORK",
        help="allow (what the rules name; the default), none (its own loopback only) or host (all of the host's)",
    )
    add_rules(network)


def add_rules(network: "argparse._ArgumentGroup") -> None:
    network.add_argument(
        "--allow", metavar="HOST[:PORT]", action="append", help="a host that can be reached: example.org, *.example.org:8443"
    )
    network.add_argument("--deny", metavar="HOST[:PORT]", action="append", help="a host that cannot, whatever allows it")
    network.add_argument(
        "--preset",
        metavar="NAME",
        action="append",
        help="hosts by what they are for: packages (the default), models; none forgets those before it",
    )
    network.add_argument(
        "--forward", metavar="SERVICE", action="append", help="a service of the host: PORT, HOST:PORT or unix:PATH"
    )
    network.add_argument(
        "--publish",
        metavar="[HOST_PORT:]PORT",
        action="append",
        help="a port inside, reached on the host's loopback; 0:PORT picks a free one",
    )


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    """What was given, by the names of the settings."""
    found = {key: getattr(arguments, option, None) for option, key in _OPTIONS.items()}
    return {key: value for key, value in found.items() if value is not None}

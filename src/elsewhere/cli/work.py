"""Verbs that run commands, and those about what runs: run, exec, shell, ps, kill, logs, requests, top, cancel."""

import argparse
import json
import os
import sys
import time

from elsewhere import units
from elsewhere.cli import show
from elsewhere.cli.confining import add_confinement, settings_of
from elsewhere.cli.parsing import (
    Parser,
    Verbs,
    add_base,
    add_command,
    add_environment,
    add_id,
    command_of,
    count,
    environment_of,
    print_json,
)
from elsewhere.cli.progress import teller
from elsewhere.errors import UsageError
from elsewhere.operations import executing, processes, running, usage
from elsewhere.operations.documents.commands import (
    denials_document,
    exec_document,
    processes_document,
    requests_document,
    run_document,
)
from elsewhere.operations.documents.sandboxes import top_document
from elsewhere.operations.executing import ExecRequest
from elsewhere.operations.running import RunRequest
from elsewhere.sandbox.keeping import wire
from elsewhere.sandbox.keeping.callers import Signals
from elsewhere.sandbox.live import Live
from elsewhere.sandbox.records.request import TERMINAL, UNFINISHED

__all__ = ["add"]

_RUN_EPILOG = """The exit code is the command's own; 124 after a time-out, 125 if elsewhere failed, 126 and 127 as in a shell.

examples:
  elsewhere run -- rm -rf src
  elsewhere run --timeout 5m -- pytest -q
  elsewhere run --env DEBUG=1 -c 'make && ./server --check'
  elsewhere run --base-ref v1.0 -- make test
  elsewhere run --json --discard -- npm test
"""
_EXEC_EPILOG = """A sandbox that is stopped is started. What the command leaves in the background stays; `elsewhere ps` shows it.
The exit code is the command's own; 124 after a time-out, 125 if elsewhere failed, 126 and 127 as in a shell.

examples:
  elsewhere exec fix -- make test
  elsewhere exec fix -c 'cd src && ls'
  elsewhere exec -d fix -- python -m http.server 8000
  elsewhere exec --timeout 5m fix -- pytest -q
"""


_TOP_EPILOG = """examples:
  elsewhere top
  elsewhere top --count 1 fix
  elsewhere top --json-lines --every 10s
"""


def add(verbs: Verbs) -> None:
    run = verbs.add("run", _run, "clone, run a command, show what changed", _RUN_EPILOG)
    add_base(run, "live")
    run.add_argument("--cwd", metavar="DIR", help="where the command starts, inside the project (default: here)")
    keeping = run.add_mutually_exclusive_group()
    keeping.add_argument("--keep", action="store_true", help="keep the sandbox even if nothing changed")
    keeping.add_argument("--discard", action="store_true", help="throw the sandbox away even if something changed")
    add_environment(run)
    add_confinement(run, lives=False)
    run.add_argument("--explain", action="store_true", help="list every mount of the sandbox on stderr before the command starts")
    add_command(run)

    execute = verbs.add("exec", _exec, "run a command in a sandbox that is there", _EXEC_EPILOG)
    _add_exec_options(execute)
    add_id(execute)
    add_command(execute)
    execute.after_id = Parser(prog=execute.prog, add_help=False, allow_abbrev=False)
    execute.after_id.add_argument("--json", action="store_true")
    _add_exec_options(execute.after_id)
    add_command(execute.after_id)

    shell = verbs.add("shell", _shell, "a shell in a sandbox", "examples:\n  elsewhere shell fix\n")
    shell.add_argument("--cwd", metavar="DIR", help="where it starts, relative to the project (default: here)")
    add_environment(shell)
    add_id(shell)

    add_id(verbs.add("ps", _ps, "what runs in a sandbox", "examples:\n  elsewhere ps fix\n"))
    kill = verbs.add("kill", _kill, "send a process of a sandbox a signal", "examples:\n  elsewhere kill fix 17 -s KILL\n")
    add_id(kill)
    kill.add_argument("pid", metavar="PID", type=int, help="its number, as `elsewhere ps` shows it")
    kill.add_argument("-s", "--signal", metavar="SIGNAL", default="TERM", help="a name or a number; default TERM")
    logs = verbs.add("logs", _logs, "what a detached command said", "examples:\n  elsewhere logs fix\n  elsewhere logs -f fix\n")
    add_id(logs)
    logs.add_argument("request", metavar="REQUEST", nargs="?", help="an id, or the beginning of one; default: the newest")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until it ends")
    logs.add_argument("--stream", choices=["stdout", "stderr"], help="only this one")
    logs.add_argument("--json-lines", action="store_true", help="one JSON document for each piece")
    requests = verbs.add(
        "requests",
        _requests,
        "what was asked for, and how it ended, newest first",
        "examples:\n  elsewhere requests\n  elsewhere requests fix --state running\n",
    )
    add_id(requests, nargs="?")
    requests.add_argument("--state", action="append", choices=[*UNFINISHED, *TERMINAL], help="only those in this state")
    requests.add_argument("--limit", metavar="N", type=count, default=50, help="at most so many; default 50")
    top = verbs.add("top", _top, "what running sandboxes use, as it changes", _TOP_EPILOG)
    add_id(top, nargs="*")
    top.add_argument("--every", metavar="TIME", type=units.duration, default=2.0, help="how often; default 2s")
    top.add_argument(
        "--count", metavar="N", type=count, help="how many times; default: until interrupted, once if not a terminal"
    )
    top.add_argument("--json-lines", action="store_true", help="one JSON document for each time")
    cancel = verbs.add("cancel", _cancel, "end a request, or all of a sandbox", "examples:\n  elsewhere cancel fix\n")
    cancel.add_argument("id", metavar="ID", help="a request, or the beginning of its id; or a sandbox: all unfinished ones in it")


def _add_exec_options(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-t", "--terminal", action="store_true", help="insist on a terminal (there is one anyway if this is one)")
    how.add_argument("-d", "--detach", action="store_true", help="leave it running; `elsewhere logs` shows what it says")
    parser.add_argument("--cwd", metavar="DIR", help="where it starts, relative to the project (default: here)")
    add_environment(parser)


def _run(arguments: argparse.Namespace, signals: Signals | None) -> int:
    request = RunRequest(
        argv=command_of(arguments),
        project=arguments.project,
        directory=arguments.cwd,
        base=arguments.base,
        base_ref=arguments.base_ref,
        keep=arguments.keep,
        discard=arguments.discard,
        timeout=arguments.timeout,
        environment=environment_of(arguments),
        settings=settings_of(arguments),
        capture=arguments.json,
    )

    def on_ready(live: Live) -> None:
        if arguments.explain:
            show.plan(live.record)
        show.weaker(live.record)

    result = running.run(request, signals, on_ready, teller(), show.remark)
    if arguments.json:
        print_json(run_document(result))
    else:
        show.run(result)
    return result.outcome.exit_code


def _exec(arguments: argparse.Namespace, signals: Signals | None) -> int:
    wanted = ExecRequest(
        sandbox=arguments.id,
        argv=command_of(arguments),
        directory=arguments.cwd,
        environment=environment_of(arguments),
        timeout=arguments.timeout,
        terminal=arguments.terminal,
        detached=arguments.detach,
        capture=arguments.json,
    )
    result = executing.execute(wanted, signals, show.remark)
    if arguments.json:
        print_json(exec_document(result))
    else:
        show.executed(result)
    return 0 if result.outcome is None else result.outcome.exit_code


def _shell(arguments: argparse.Namespace, signals: Signals | None) -> int:
    if arguments.json:
        raise UsageError("no_json", "a shell has no document", hint="elsewhere exec --json ID -- COMMAND")
    wanted = ExecRequest(
        sandbox=arguments.id,
        argv=[os.environ.get("SHELL") or "/bin/sh"],
        directory=arguments.cwd,
        environment=environment_of(arguments),
        timeout=arguments.timeout,
        kind="shell",
    )
    result = executing.execute(wanted, signals, show.remark)
    assert result.outcome is not None, "it is not detached"
    return result.outcome.exit_code


def _ps(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    found, running_ = processes.processes(arguments.id)
    if arguments.json:
        print_json(processes_document(found, running_))
    else:
        show.processes(running_)
    return 0


def _kill(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    number = processes.signal_number(arguments.signal)
    found = processes.kill(arguments.id, arguments.pid, number)
    if arguments.json:
        print_json({"sandbox": {"id": found.id}, "pid": arguments.pid, "signal": number})
    return 0


def _logs(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    streams = (arguments.stream,) if arguments.stream else ("stdout", "stderr")
    pieces = processes.logs(arguments.id, request=arguments.request, streams=streams, follow=arguments.follow)
    if arguments.json and arguments.json_lines:
        raise UsageError("no_json", "one document and many exclude each other", hint="give --json or --json-lines")
    if arguments.json:
        if arguments.follow:
            raise UsageError("no_json", "what goes on has no single document", hint="--json-lines")
        said = dict.fromkeys(streams, b"")
        for piece in pieces:
            said[piece.stream] += piece.data
        words = {name: data.decode("utf-8", "replace") for name, data in said.items()}
        print_json({**words, "denials": denials_document(*processes.denied(arguments.id, arguments.request))})
        return 0
    for piece in pieces:
        if arguments.json_lines:
            print(json.dumps({"stream": piece.stream, "data": piece.data.decode("utf-8", "replace")}), flush=True)
        else:
            target = sys.stdout if piece.stream == "stdout" else sys.stderr
            target.buffer.write(piece.data)
            target.buffer.flush()
    refused = denials_document(*processes.denied(arguments.id, arguments.request))
    if arguments.json_lines:
        for denial in refused:
            print(json.dumps({"denial": denial}), flush=True)
    else:
        show.denials(refused)
    return 0


def _requests(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    found = processes.requests(arguments.ids, states=arguments.state, limit=arguments.limit)
    if arguments.json:
        print_json(requests_document(found))
    else:
        show.requests(found)
    return 0


def _top(arguments: argparse.Namespace, signals: Signals | None) -> int:
    if arguments.json and (arguments.json_lines or arguments.count not in (None, 1)):
        raise UsageError("no_json", "one document and many exclude each other", hint="--json-lines")
    endless = arguments.json_lines or (sys.stdout.isatty() and not arguments.json)
    left = arguments.count if arguments.count is not None else -1 if endless else 1
    while left:
        found = usage.top(arguments.ids)
        if arguments.json or arguments.json_lines:
            print_json(top_document(found))
        else:
            show.top(found, again=sys.stdout.isatty() and left != 1)
        left -= 1
        if left and not _pause(signals, arguments.every):
            break
    return 0


def _pause(signals: Signals | None, seconds: float) -> bool:
    """Whether nobody interrupted it."""
    if signals is None:
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            return False
        return True
    return not wire.readable(signals.sock, seconds)


def _cancel(arguments: argparse.Namespace, _signals: Signals | None) -> int:
    found = processes.cancel(arguments.id)
    if arguments.json:
        print_json(requests_document(found))
    else:
        show.requests(found)
    return 0

"""Stages: what a project's file may say about them, what of it needs trust, and how far a change has come."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from elsewhere import settings
from elsewhere.cli.promotion import show_done
from elsewhere.errors import CheckFailed, NotFound, Refused, UsageError
from elsewhere.operations import settings as operations
from elsewhere.operations import undoing
from elsewhere.promotion import deploying, records, restoring, stages
from elsewhere.promotion.records import Promotion
from elsewhere.promotion.stages import Branch, Deploy, Directory, Stage
from elsewhere.storage.state import State

THREE = """
[[stages]]
name = "dev"
target = "."
checks = ["pytest -q"]
[[stages]]
name = "staging"
target = { branch = "staging" }
checks = ["pytest -q", "make lint"]
[[stages]]
name = "production"
deploy = "./deploy.sh"
rollback = "./rollback.sh"
approve = "person"
"""


def parsed(place: Path, text: str, *, trusted: bool = False) -> list[Stage]:
    path = str(place / "elsewhere.toml")
    settings.parse(path, text.encode(), str(place), project=True)
    return stages.parse(settings.stages(path, text.encode()), path, str(place), trusted=trusted)


def refusal(place: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parsed(place, text)
    assert str(place / "elsewhere.toml") in caught.value.message
    assert caught.value.hint
    return caught.value


def one(**lines: str) -> str:
    """A stage that is right, but for what is given; an empty line takes one away."""
    said = {"name": '"dev"', "target": '"."', **lines}
    return "[[stages]]\n" + "".join(f"{key} = {value}\n" for key, value in said.items() if value)


# -- what they say --------------------------------------------------------------------------------------------------------------


def test_three_stages_are_understood_in_order(place: Path) -> None:
    dev, staging, production = parsed(place, THREE)
    assert dev == Stage("dev", Directory(str(place)), ("pytest -q",))
    assert staging == Stage("staging", Branch(str(place), "staging"), ("pytest -q", "make lint"))
    assert production.target == Deploy("./deploy.sh", "./rollback.sh", 600)
    assert production.approve == "person"


def test_a_file_without_stages_has_none(place: Path) -> None:
    assert parsed(place, "[limits]\npids = 5\n") == []
    assert parsed(place, "stages = []\n") == []


def test_a_target_is_relative_to_the_project_and_free_of_links(place: Path) -> None:
    (place / "real").mkdir()
    (place / "link").symlink_to("real")
    (found,) = parsed(place, one(target='"link/x"'))
    assert found.target == Directory(f"{place}/real/x")
    (found,) = parsed(place, one(target='{ repository = "../other", branch = "feature/a" }'))
    assert found.target == Branch(str(place.parent / "other"), "feature/a")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ({"target": '"."'}, ""),
        ({"target": '"sub/.."'}, ""),
        ({"target": '".vscode"'}, "other paths"),
        ({"target": '{ branch = "x" }'}, ""),
        ({"target": '{ repository = ".", branch = "x" }'}, ""),
        ({"target": '".."'}, "outside"),
        ({"target": '"/srv/www"'}, "outside"),
        ({"target": '"~/www"'}, "outside"),
        ({"target": '"way-out"'}, "outside"),
        ({"target": '{ repository = "../other", branch = "x" }'}, "another repository"),
        ({"target": "", "deploy": '"a"', "rollback": '"b"'}, "host"),
    ],
)
def test_what_reaches_beyond_the_project_needs_trust(place: Path, lines: dict[str, str], why: str) -> None:
    (place / "way-out").symlink_to("/srv")
    (found,) = parsed(place, one(**lines))
    assert why in found.reaches
    assert bool(found.reaches) == bool(why)
    if why:
        with pytest.raises(Refused) as caught:
            stages.refuse_untrusted([found], str(place))
        assert caught.value.code == "stage_not_trusted"
        assert "elsewhere trust" in caught.value.hint
        assert "dev" in caught.value.message
    stages.refuse_untrusted(parsed(place, one(**lines), trusted=True), str(place))


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (one(name=""), "no name", "name ="),
        (one(name='"a b"'), "'a b'", "letters"),
        (one(name='"-a"'), "'-a'", "letters"),
        (one(name='""'), "''", "letters"),
        (one(name='"é"'), "'é'", "letters"),
        (one(name="7"), "7", "letters"),
        (one(name='"../x"'), "'../x'", "letters"),
        (one() + one(), "two stages have the name 'dev'", "name of its own"),
        (one(target=""), "neither a target nor deploy", "deploy ="),
        (one(deploy='"x"', rollback='"y"'), "both a target and deploy", "two stages"),
        (one(target="", deploy='"x"'), "deploy and no rollback", "rollback ="),
        (one(target="", rollback='"x"'), "rollback and no deploy", "deploy ="),
        (one(target="", deploy='""', rollback='"x"'), "deploy = ''", "deploy ="),
        (one(target="", deploy='"x"', rollback='"y"', timeout='"soon"'), "'soon' is not a duration", "15m"),
        (one(target="", deploy='"x"', rollback='"y"', timeout="[]"), "[] is not a duration", "15m"),
        (one(timeout='"5m"'), "timeout is for deploy", "limits.timeout"),
        (one(target='""'), "target = ''", "target ="),
        (one(target="5"), "target = 5", "target ="),
        (one(target='".git/hooks"'), "git's own directory", "branch ="),
        (one(target='"sub/.git"'), "git's own directory", "branch ="),
        (one(target="{}"), "no branch", "branch ="),
        (one(target='{ branch = "a..b" }'), "'a..b'", "git branch"),
        (one(target='{ branch = "-a" }'), "'-a'", "git branch"),
        (one(target="{ branch = 5 }"), "branch = 5", "branch ="),
        (one(checks='"pytest"'), "checks = 'pytest'", "checks ="),
        (one(checks="[1]"), "checks = 1", "checks ="),
        (one(checks='["  "]'), "checks = '  '", "checks ="),
        (one(approve='"nobody"'), "'nobody' is neither auto nor person", "person"),
        (one(approve="true"), "True is neither auto nor person", "person"),
    ],
)
def test_a_bad_stage_is_an_error_that_teaches(place: Path, text: str, said: str, hint: str) -> None:
    error = refusal(place, text)
    assert error.code == "bad_stage"
    assert said in error.message
    assert "stage 1" in error.message or "two stages" in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (one(check='["x"]'), "'check'", "'checks'"),
        (one(target='{ brnch = "x" }'), "'brnch'", "'branch'"),
        (one(zzz="1"), "'zzz'", "known here: approve, checks"),
        (one(zzz="1"), "stage 1 (dev)", ""),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_right_one(place: Path, text: str, said: str, hint: str) -> None:
    error = refusal(place, text)
    assert error.code == "unknown_setting"
    assert said in error.message
    assert hint in error.hint


@pytest.mark.parametrize("text", ["stages = 5\n", "[stages]\nname = 'x'\n", "stages = [1]\n"])
def test_stages_are_tables_of_a_list(place: Path, text: str) -> None:
    error = refusal(place, text)
    assert error.code == "bad_settings"
    assert "[[stages]]" in error.hint


def test_stages_are_not_for_the_users_file() -> None:
    with pytest.raises(UsageError, match="one project"):
        settings.parse("/x/elsewhere.toml", THREE.encode(), "/x", project=False)


def test_the_stages_of_the_template_can_be_used(place: Path) -> None:
    template = settings.template()
    shown = "".join(f"{line[2:]}\n" for line in template[template.index("# [[stages]]") : template.index("# Races")].splitlines())
    assert [stage.name for stage in parsed(place, shown)] == ["dev", "staging", "production"]


# -- trust ----------------------------------------------------------------------------------------------------------------------


def test_stages_are_trusted_with_the_file_and_until_it_changes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSEWHERE_HOME", str(place / "state"))
    monkeypatch.setenv("HOME", str(place))
    (place / "project").mkdir()
    state, project, file = State.open(), str(place / "project"), place / "project" / "elsewhere.toml"
    assert operations.stages(state, project) == []
    file.write_text(THREE)
    assert [stage.trusted for stage in operations.stages(state, project)] == [False] * 3
    told = operations.trust(project)
    assert [(one.key, one.value) for one in told.widens] == [("stages.production", "./deploy.sh (back: ./rollback.sh)")]
    assert [stage.trusted for stage in operations.stages(state, project)] == [True] * 3
    file.write_text(THREE + "\n")
    assert [stage.trusted for stage in operations.stages(state, project)] == [False] * 3


# -- how far a change has come --------------------------------------------------------------------------------------------------


def entries(place: Path, **statuses: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for stage in parsed(place, THREE):
        stages.entry_of(found, stage)["status"] = statuses.get(stage.name, "pending")
    return found


@pytest.mark.parametrize(
    ("statuses", "to", "left"),
    [
        ({}, "dev", ["dev"]),
        ({}, "production", ["dev", "staging", "production"]),
        ({"dev": "passed"}, "staging", ["staging"]),
        ({"dev": "passed", "staging": "waiting"}, "production", ["staging", "production"]),
        ({"dev": "failed"}, "staging", ["dev", "staging"]),
        ({"dev": "passed", "staging": "passed"}, "staging", []),
        ({"staging": "passed"}, "production", ["dev", "production"]),
    ],
)
def test_no_stage_can_be_skipped(place: Path, statuses: dict[str, str], to: str, left: list[str]) -> None:
    found = stages.ahead(parsed(place, THREE), entries(place, **statuses), to)
    assert [stage.name for stage in found] == left


def test_a_stage_that_is_not_there_is_told_with_those_that_are(place: Path) -> None:
    with pytest.raises(NotFound) as caught:
        stages.ahead(parsed(place, THREE), [], "prod")
    assert caught.value.code == "no_such_stage"
    assert "dev, staging, production" in caught.value.hint
    with pytest.raises(NotFound) as caught:
        stages.ahead([], [], "prod")
    assert caught.value.code == "no_stages"


def test_where_a_change_stands(place: Path) -> None:
    assert stages.standing(entries(place)) == "not begun"
    assert stages.standing(entries(place, dev="passed", staging="waiting")) == "passed dev; waiting at staging"
    assert stages.standing(entries(place, dev="passed", staging="passed")) == "passed dev, staging"


def test_an_entry_can_be_written_down_and_is_found_again(place: Path) -> None:
    found = entries(place, dev="passed")
    again = json.loads(json.dumps(found))
    assert again == found
    (dev, *_) = parsed(place, THREE)
    assert stages.entry_of(again, dev) is again[0]
    assert len(again) == 3


# -- what is taken back ---------------------------------------------------------------------------------------------------------

NOTHING = {"kind": "nothing"}
UNMOVED = {"kind": "branch", "repository": "/nowhere", "branch": "x", "old": "1", "new": "1"}


def deployed(place: Path, rollback: str) -> dict[str, Any]:
    return {
        "kind": "deploy",
        "change": str(place),
        "deploy": "true",
        "rollback": rollback,
        "timeout": 60,
        "runs": [],
    }


@pytest.fixture
def promoted(place: Path, monkeypatch: pytest.MonkeyPatch) -> Promotion:
    """Through two stages; the third one is the test's."""
    monkeypatch.setenv("ELSEWHERE_HOME", str(place / "state"))
    (place / "project").mkdir()
    made = records.new(State.open(), "promote", "box", str(place / "project"))
    made.stages = entries(place, dev="passed", staging="passed")
    made.stages[0]["application"], made.stages[1]["application"] = dict(NOTHING), dict(UNMOVED)
    return made


def test_an_undo_without_a_name_passes_over_what_moved_nothing(place: Path, promoted: Promotion) -> None:
    production = promoted.stages[2]
    production.update(status="passed", application=deployed(place, "true"))
    promoted.end("applied")
    later = records.new(State.open(), "promote", "box", promoted.project)
    later.stages = [{**one, "application": dict(NOTHING)} for one in promoted.stages]
    later.end("applied")
    assert undoing.undo(dry_run=True, wanted=later.id).original.id == later.id, "by its name"
    assert undoing._last(State.open(), promoted.project).id == promoted.id
    production.update(application=dict(NOTHING))
    promoted.end("applied")
    with pytest.raises(NotFound, match="nothing was promoted"):
        undoing._last(State.open(), promoted.project)


def test_where_nothing_was_done_nothing_is_taken_back(promoted: Promotion) -> None:
    promoted.stages[2].update(status="passed", application=dict(NOTHING))
    restoring.take_back(promoted)
    assert [one["status"] for one in promoted.stages] == ["undone"] * 3


@pytest.mark.parametrize("ended", [True, False])
def test_what_a_deployment_started_runs_until_its_rollback_unless_it_was_interrupted(
    place: Path, promoted: Promotion, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    production = promoted.stages[2]
    line = 'grep -q ELSEWHERE_STAGE /proc/"$(cat service)"/environ 2> /dev/null && kill -9 "$(cat service)" && touch found; true'
    data = deployed(place, line)
    data["deploy"] = "setsid sleep 68 > /dev/null 2>&1 & echo $! > service"
    production.update(status="passed", application=data)
    run = deploying.run

    def interrupted(*words: Any) -> None:
        run(*words)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.nullcontext() if ended else pytest.raises(KeyboardInterrupt):
        patched.setattr(deploying, "run", run if ended else interrupted)
        restoring.command(promoted, production, "deploy")
    assert data["begun"] == (None if ended else "deploy")
    restoring.take_back(promoted)
    assert (place / "project" / "found").exists() == ended
    assert (production["status"], data["begun"]) == ("undone", None)


@pytest.mark.parametrize("status", ["failed", "reversed", "waiting"])
def test_a_rollback_that_failed_is_run_again_by_an_undo(place: Path, promoted: Promotion, status: str) -> None:
    """Its status stays until it succeeds, so that whoever is killed is followed by somebody who tries it again."""
    (place / "project" / "live").mkdir()
    production = promoted.stages[2]
    data = deployed(place, "test -e mended && rmdir live")
    production.update(status=status, application=data, not_reversed="it ended with 1")
    promoted.end("failed")
    assert undoing._is_there(promoted)
    with pytest.raises(CheckFailed) as caught:
        undoing.undo(promoted.id)
    assert (caught.value.code, caught.value.detail["stages"]) == ("rollback_failed", ["production"])
    again = records.load(State.open(), promoted.id)
    assert [one["status"] for one in again.stages] == ["undone", "undone", status]
    assert "ended with 1" in again.stages[2]["not_reversed"]
    assert undoing._last(State.open(), promoted.project).id == promoted.id
    (place / "project" / "mended").touch()
    undoing.undo(promoted.id)
    again = records.load(State.open(), promoted.id)
    assert (again.status, again.stages[2]["status"], again.stages[2]["not_reversed"]) == ("undone", "undone", None)
    assert not (place / "project" / "live").exists()
    with pytest.raises(Refused, match="nothing to undo"):
        undoing.undo(promoted.id)


def test_whoever_is_killed_while_that_is_tried_is_followed_by_somebody_who_tries_it_again(
    place: Path, promoted: Promotion, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "project" / "live").mkdir()
    promoted.stages[1]["application"] = dict(NOTHING)
    promoted.stages[2].update(status="failed", application=deployed(place, "rmdir live"), not_reversed="it ended with 1")
    promoted.end("failed")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(deploying, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            undoing.undo(promoted.id)
    again = records.load(State.open(), promoted.id)
    assert (again.stages[2]["status"], again.stages[2]["not_reversed"]) == ("failed", "it ended with 1")
    assert undoing.promotion(promoted.id).status == "undone", "whoever looks goes on"
    assert not (place / "project" / "live").exists()


def test_what_others_made_of_a_stage_while_it_was_put_back_is_not_tried_again(promoted: Promotion) -> None:
    """The journal was reversed, and what stayed is theirs."""
    promoted.stages[0].update(status="reversed", application="1", not_reversed="somebody changed it meanwhile")
    assert restoring.left(promoted) == []
    promoted.stages[0].update(application=None)
    assert restoring.left(promoted) == []


def test_names_in_a_conflict_of_a_stage_are_fit_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a directory that is not empty, the sentence names what is in it."""
    conflict = {"path": "d", "sentence": "it is not empty: \x1b[2J"}
    stage = {"name": "dev", "status": "planned", "conflicts": [conflict]}
    nothing: dict[str, list[str]] = {"conflicts": [], "applied": [], "merged": [], "deleted": []}
    show_done({**nothing, "id": None, "status": "planned", "marked": [], "stages": [stage]})
    said = capsys.readouterr().out
    assert ("\x1b[2J" in said, "it is not empty: \\x1b[2J" in said) == (False, True)

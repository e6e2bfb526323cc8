"""Installing where there is no Linux kernel ends in one clear sentence. The other platform is faked: none can be had here."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling")


def hook(target: str) -> object:
    place = Path(__file__).parents[2] / "scripts" / "build_hook.py"
    spec = importlib.util.spec_from_file_location("build_hook", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LinuxOnly(str(place.parent), {}, None, None, "", target)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_a_wheel_is_not_built_on_another_platform(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(SystemExit) as caught:
        hook("wheel").initialize("standard", {})  # type: ignore[attr-defined]
    said = str(caught.value)
    assert platform in said
    assert "WSL2" in said
    assert "\n" not in said


def test_a_wheel_is_built_on_linux() -> None:
    hook("wheel").initialize("standard", {})  # type: ignore[attr-defined]

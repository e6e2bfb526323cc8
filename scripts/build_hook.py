"""Refuses to build on a system that has no Linux kernel, in one sentence, before anything is installed."""

import sys

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LinuxOnly(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        del version, build_data
        if self.target_name == "wheel" and not sys.platform.startswith("linux"):
            sys.exit(
                "elsewhere needs a Linux kernel and this is "
                f"{sys.platform}: install it on Linux, or on Windows inside WSL2 (wsl --install)."
            )

"""Identity: derived once from workflow, story and request, and the same everywhere: directory, environment, env file.

    hash                  first 8 hex digits of SHA-1 of `workflow:story:request`
    sandbox id            slug `ew-workflow-story-hash`, at most 48 characters
    compose project name  `ew_workflow_hash`, at most 40 characters

What is too long is cut before the hash, never in it.
"""

import hashlib
import json
import secrets

from elsewhere.values import dataclass

__all__ = ["RESERVED", "Identity", "derive", "env_file"]

_PREFIX = "ew"
RESERVED = ("ELSEWHERE_", "COMPOSE_PROJECT_NAME")
ALLOWED = ("ELSEWHERE_ALLOW_NESTED",)  # says something about the sandbox's work, not about the sandbox


@dataclass(frozen=True, slots=True)
class Identity:
    sandbox_id: str
    slug: str
    compose_project_name: str
    workflow: str
    story: str
    request: str
    base_sha: str

    def variables(self) -> dict[str, str]:
        """What tools inside, and whoever reads the env file, know the sandbox by."""
        return {
            "COMPOSE_PROJECT_NAME": self.compose_project_name,
            "ELSEWHERE_SANDBOX_BASE_SHA": self.base_sha,
            "ELSEWHERE_SANDBOX_ID": self.sandbox_id,
            "ELSEWHERE_SANDBOX_MODE": "minimal",
            "ELSEWHERE_SANDBOX_REQUEST_ID": self.request,
            "ELSEWHERE_SANDBOX_SLUG": self.slug,
            "ELSEWHERE_SANDBOX_STORY_ID": self.story,
            "ELSEWHERE_SANDBOX_WORKFLOW_ID": self.workflow,
        }


def derive(workflow: str, story: str, request: str | None = None, base_sha: str | None = None) -> Identity:
    request = request or secrets.token_hex(8)
    digest = hashlib.sha1(f"{workflow}:{story}:{request}".encode(errors="surrogateescape"), usedforsecurity=False).hexdigest()[:8]
    slug = f"{_slug(workflow, '-')}-{_slug(story, '-')}"
    return Identity(
        sandbox_id=f"{_cut(f'{_PREFIX}-{slug}', 48 - 9, '-')}-{digest}",
        slug=slug,
        compose_project_name=f"{_cut(f'{_PREFIX}_' + _slug(workflow, '_'), 40 - 9, '_')}_{digest}",
        workflow=workflow,
        story=story,
        request=request,
        base_sha=base_sha or "",
    )


def _slug(text: str, separator: str) -> str:
    kept = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in text.lower())
    return separator.join(kept.split()) or "sandbox"


def _cut(text: str, length: int, separator: str) -> str:
    return text[:length].rstrip(separator)


def env_file(variables: dict[str, str]) -> bytes:
    """Sorted `KEY=value` lines; a value with anything unusual in it is quoted as JSON, and none has a line break."""
    lines = []
    for key in sorted(variables):
        value = variables[key].replace("\r", "").replace("\n", "")
        plain = all(letter.isascii() and (letter.isalnum() or letter in "-_./:@%+,=") for letter in value)
        lines.append(f"{key}={value if plain else json.dumps(value)}\n")
    return "".join(lines).encode()

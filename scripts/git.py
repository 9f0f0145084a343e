"""Git, with the user's and the machine's settings out of the way."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.shell import Failure, everything, run

# Commit ids must depend on content only, so the committer is fixed too.
IDENTITY = ("Gemma 4 KV offloading project", "gemma4kv@users.noreply.github.com")
_SETTINGS = {
    "core.autocrlf": "false",
    "core.fileMode": "true",
    "core.quotePath": "false",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "init.defaultBranch": "series",
    "advice.mergeConflict": "false",
    # What a patch file looks like must not depend on anybody's configuration.
    "diff.algorithm": "myers",
    # A moved file is shown whole, so that every file's blob ids stand in the patch.
    "diff.renames": "false",
    "diff.context": "3",
    "diff.interHunkContext": "0",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
}


@dataclass(frozen=True)
class Git:
    """A repository at `folder`."""

    folder: Path

    def __call__(self, *arguments: str | Path, date: str = "", **options) -> str:
        """Run a git command and return its output without the last line break.

        Raises:
            Failure: git says no.
        """
        return self.attempt(*arguments, date=date, check=True, **options).stdout.rstrip("\n")

    def attempt(
        self, *arguments: str | Path, date: str = "", check: bool = False, **options
    ) -> subprocess.CompletedProcess[str]:
        """Like a call, but an exit status other than 0 is the caller's to judge."""
        settings = [item for pair in _SETTINGS.items() for item in ("-c", "=".join(pair))]
        environment: dict[str, str | None] = _no_inherited_settings() | {
            # If `folder` is no repository, the project around it must not be taken for it.
            "GIT_CEILING_DIRECTORIES": str(self.folder.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_COMMITTER_NAME": IDENTITY[0],
            "GIT_COMMITTER_EMAIL": IDENTITY[1],
            "GIT_EDITOR": "true",
            "LC_ALL": "C",
        }
        if date:
            environment |= {
                "GIT_AUTHOR_NAME": IDENTITY[0],
                "GIT_AUTHOR_EMAIL": IDENTITY[1],
                "GIT_AUTHOR_DATE": date,
                "GIT_COMMITTER_DATE": date,
            }
        return run(
            ["git", "-C", self.folder, *settings, *arguments],
            env=environment,
            check=check,
            **options,
        )

    def tree(self, revision: str) -> str:
        return self("rev-parse", f"{revision}^{{tree}}")

    def find(self, revision: str) -> str | None:
        """Object id of `revision`, or None."""
        found = self.attempt("rev-parse", "--verify", "--quiet", revision)
        return found.stdout.strip() if found.returncode == 0 else None

    def path(self, name: str) -> Path:
        """A file of git's own, such as `rebase-apply`."""
        return self.folder / self("rev-parse", "--git-path", name)


def _no_inherited_settings() -> dict[str, str | None]:
    """Take out what a hook or a `git -c` around us says about another repository."""
    transport = ("GIT_SSL_", "GIT_SSH", "GIT_HTTP", "GIT_PROXY", "GIT_ASKPASS", "GIT_EXEC_PATH")
    return {
        name: None
        for name in os.environ
        if name.startswith("GIT_") and not name.startswith(transport)
    }


def fetch_tag(repository: Git, source: str, tag: str, timeout: float) -> str:
    """Fetch one tag, with the user's own network settings, and return its commit.

    Raises:
        Failure: `source` cannot be reached in `timeout` seconds or lacks the tag.
    """
    refspec = f"refs/tags/{tag}:refs/tags/{tag}"
    base = ["git", "-C", repository.folder]
    settings = _no_inherited_settings()
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"):
        settings.pop(name, None)
    quiet = settings | {"GIT_TERMINAL_PROMPT": "0"}
    # A plain path would be taken relative to the new repository, and as a local clone,
    # which cannot be shallow.
    if Path(source).expanduser().is_dir():
        source = Path(source).expanduser().resolve().as_uri()
    # Ask first: a server that does not answer should cost seconds, a fetch may take long.
    asked = run([*base, "ls-remote", "--exit-code", source, f"refs/tags/{tag}"],
                env=quiet, check=False, timeout=timeout)  # fmt: skip
    if asked.returncode == 2:
        raise Failure(f"{source} has no tag {tag}")
    if asked.returncode:
        raise Failure(f"{source} cannot be read: {everything(asked)}")
    run([*base, "fetch", "--quiet", "--depth=1", "--no-tags", source, refspec], env=quiet)
    return repository("rev-parse", f"refs/tags/{tag}^{{commit}}")

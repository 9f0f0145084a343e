"""Git, with the user's and the machine's settings out of the way."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.shell import Failure, run

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
        environment: dict[str, str | None] = {
            # A hook that calls us names its own repository; ours is `folder`, and if that
            # is none, the project around it must not be taken for it.
            "GIT_DIR": None,
            "GIT_WORK_TREE": None,
            "GIT_INDEX_FILE": None,
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


def fetch_tag(repository: Git, source: str, tag: str, timeout: float) -> str:
    """Fetch one tag, with the user's own network settings, and return its commit.

    Raises:
        Failure: `source` cannot be reached in `timeout` seconds or lacks the tag.
    """
    refspec = f"refs/tags/{tag}:refs/tags/{tag}"
    base = ["git", "-C", repository.folder]
    quiet = {"GIT_TERMINAL_PROMPT": "0"}
    # Ask first: a server that does not answer should cost seconds, a fetch may take long.
    asked = run([*base, "ls-remote", "--exit-code", source, f"refs/tags/{tag}"],
                env=quiet, check=False, timeout=timeout)  # fmt: skip
    if asked.returncode == 2:
        raise Failure(f"{source} has no tag {tag}")
    if asked.returncode:
        raise Failure(f"{source} cannot be read: {asked.stdout.strip()}")
    # A shallow fetch needs a transport; a plain path would be taken as a local clone.
    if Path(source).is_dir():
        source = Path(source).resolve().as_uri()
    run([*base, "fetch", "--quiet", "--depth=1", "--no-tags", source, refspec], env=quiet)
    return repository("rev-parse", f"refs/tags/{tag}^{{commit}}")

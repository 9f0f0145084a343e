"""The examples in `deploy/` before their ecosystems' own validators, which must bite."""

import shutil

import pytest
import yaml
from conftest import git

from scripts.pins import ROOT
from scripts.shell import everything
from scripts.upstream_lint import run_pre_commit

CHECK = ROOT / "tests" / "deploy" / "check_dashboard.py"
HOOKS = {
    "compose": (
        "check-jsonschema --builtin-schema vendor.compose-spec",
        r"compose\.yaml$",
        ["check-jsonschema==0.39.0"],
    ),
    "kubernetes": (
        "kubernetes-validate --strict --quiet",
        r"kubernetes.*\.yaml$",
        ["kubernetes-validate==1.37.0"],
    ),
    "dashboard": (
        f"python {CHECK}",
        r"kv-offloading\.json$",
        ["promql-parser==0.12.0", "grafana-foundation-sdk==1769699998!10.1.0"],
    ),
}


@pytest.fixture
def validate(tmp_path):
    """Copy `deploy/`, replace a text in one of its files, and let the validators look."""

    def validated(file="", old="", new=""):
        deploy = tmp_path / "deploy"
        shutil.copytree(ROOT / "deploy", deploy)
        if file:
            text = (deploy / file).read_text()
            assert old in text
            (deploy / file).write_text(text.replace(old, new))
        git(tmp_path, "init", "--quiet")
        git(tmp_path, "add", "--all")
        hooks = [
            {
                "id": name,
                "name": name,
                "language": "python",
                "entry": entry,
                "files": files,
                "additional_dependencies": packages,
            }
            for name, (entry, files, packages) in HOOKS.items()
        ]
        config = tmp_path / "hooks.yaml"
        config.write_text(yaml.safe_dump({"repos": [{"repo": "local", "hooks": hooks}]}))
        return run_pre_commit(tmp_path, "--config", config, "--all-files")

    return validated


def test_examples_are_valid(validate):
    done = validate()
    assert done.returncode == 0, everything(done)
    assert done.stdout.count("Passed") == len(HOOKS), done.stdout


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("compose.yaml", "mem_limit:", "memory_limit:", "memory_limit"),
        ("kubernetes.yaml", "readinessProbe:", "readinesProbe:", "readinesProbe"),
        ("kubernetes-multi-node.yaml", "replicas: 2", "replicas: two", "two"),
        (
            "monitoring/kv-offloading.json",
            "[$__rate_interval])",
            "[$__rate_interval]",
            "unclosed",
        ),
        (
            "monitoring/kv-offloading.json",
            '"gridPos"',
            '"gridPosition"',
            "Grafana knows no gridPosition",
        ),
    ],
)
def test_validators_bite(validate, file, old, new, complaint):
    done = validate(file, old, new)
    assert done.returncode == 1
    assert done.stdout.count("Failed") == 1
    assert complaint in everything(done)

"""What a command imports before it does anything: modules are counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mjp_privacy.cli import COMMANDS
from tests.helpers.runs import one_cell

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "pandas", "sympy", "scipy", "timm", "torchvision"}
NEVER_NEEDED = {  # by an attack on a model of this package
    *("sympy", "torch._dynamo", "timm", "torchvision", "lpips", "skimage", "matplotlib"),
    *("hydra", "breaching"),
}
FIRST_IMAGE = """
import sys
from attacks.april import April
attacked = April.run

def run(*arguments, **options):
    print("before:", *sys.modules)
    return attacked(*arguments, **options)

April.run = run
from mjp_privacy.cli import main
main(["attack", *sys.argv[1:], "--limit", "1"])
print("after:", *sys.modules)
"""


def modules(code: str, *argv: object) -> dict[str, set[str]]:
    """The modules that a process prints behind a word and a colon, by that word."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (line.split() for line in done.stdout.splitlines())
    return {line[0].rstrip(":"): set(line[1:]) for line in lines if line and line[0][-1] == ":"}


OVERVIEW = "import mjp_privacy.cli; mjp_privacy.cli.main(['--help'])"


@pytest.mark.parametrize("code", ["import mjp_privacy", "import attacks", OVERVIEW])
def test_importing_the_package_imports_nothing_heavy(code: str) -> None:
    loaded = modules(f"import sys; {code}; print('all:', *sys.modules)")["all"]
    assert code.partition(";")[0].split()[1] in loaded
    assert not loaded & (HEAVY | ({"numpy", "tyro", "pydantic"} if code == OVERVIEW else set()))


def test_a_commands_help_imports_nothing_heavy() -> None:
    """Nor do all of them, one after the other; the line says which one was the first that did."""
    code = f"""
import contextlib, io, sys
from mjp_privacy.cli import main
for command in {[*COMMANDS]!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([command, "--help"])
    print(command + ":", "done", *{HEAVY!r} & set(sys.modules))
"""
    assert modules(code) == {command: {"done"} for command in COMMANDS}


def test_a_folder_that_is_not_there_is_said_before_anything_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["train", str(ROOT / "configs" / "training" / "cifar10.yaml")]
    nowhere = [
        ["attack", "demo", "--images", "nowhere", "--out", "run"],
        [*train, "--data", "nowhere", "--out", "run"],
        [*train, "--data", ".", "--val", "nowhere", "--out", "run"],
        ["evaluate", "--checkpoint", "cifar_vit", "--data", "nowhere"],
    ]
    code = f"""
import sys
from mjp_privacy.cli import main
for number, command in enumerate({nowhere!r}):
    print(f"{{number}}:", "exit", main(command), *{HEAVY!r} & set(sys.modules))
"""
    assert modules(code) == {str(number): {"exit", "2"} for number in range(len(nowhere))}


def test_the_first_image_is_reached_without_what_it_does_not_need(tmp_path: Path) -> None:
    config = tmp_path / "one.yaml"
    attack = {"name": "april", "options": {"engine": "breaching"}}
    content = one_cell(attacks=[attack], models={"ViT": {"model": "cifar_vit"}})
    config.write_text(json.dumps(content | {"images": "embedded"}))
    loaded = modules(FIRST_IMAGE, config, "--out", tmp_path / "run")
    assert {"torch", "attacks.april", "mjp_privacy.experiment.run"} <= loaded["before"]
    assert not loaded["before"] & (NEVER_NEEDED | {"breaching.attacks"})
    # The attack is breaching's and was scored: without the packages around breaching's attacker.
    assert {"breaching.attacks.analytic_attack", "mjp_privacy.metrics.scores"} <= loaded["after"]
    assert not loaded["after"] & NEVER_NEEDED

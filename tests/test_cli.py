"""`mjp` and its commands: exit codes, messages without tracebacks, overrides, help."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attacks import ATTACKS, CONTROLS
from mjp_privacy import __version__
from mjp_privacy.cli import COMMANDS, overview
from mjp_privacy.experiment import run as run_module
from mjp_privacy.federation.listing import NAMES
from tests.helpers.runs import TINY, cell, one_cell, rows, tiny
from tests.helpers.workplace import Workplace

ROOT = Path(__file__).parents[1]


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Workplace:
    return Workplace(tmp_path, capsys)


# done, failed, wrong ------------------------------------------------------------------------------


def test_a_run_and_its_report(place: Workplace) -> None:
    code, said = place.attack()
    assert code == 0
    assert f"3 images in 1 cell: {place.run}" in said
    assert f"Next: mjp report {place.run}" in said
    answer = said.split("\n\n")[1].splitlines()
    code, said = place.report(place.run, "--out", place.run / "report")
    assert code == 0
    assert said.startswith("Not shown: ")  # april alone knows no client that is trained
    assert said.splitlines()[: len(answer) - 1] == answer[:-1]  # which the attack ended with
    assert len(answer) <= 10
    assert f"The page: {place.run / 'report' / 'index.html'}" in said
    for name in ("index.html", "table.md", "table.csv", "table.tex", "samples.csv"):
        assert (place.run / "report" / name).is_file()


@pytest.mark.nightly
def test_a_report_prints_all_lines_and_writes_all_pictures_on_request(place: Workplace) -> None:
    assert place.attack()[0] == 0
    out = place.run / "report"
    short = place.report(place.run, "--out", out)[1]
    code, said = place.report(place.run, "--out", out, "--all", "--pictures", "all")
    assert code == 0
    assert len(said) > len(short)
    assert "PSNR: standard variant" in said
    assert "PSNR: standard variant" not in short
    assert "## Ceilings and the linear system" in (out / "table.md").read_text()
    pictures = list((out / "pictures").rglob("*.png"))
    assert len(pictures) == 3 * 3  # the originals, what was fed, and one attack's
    assert place.report(place.run, "--out", out, "--pictures", "none")[0] == 0
    assert not list((out / "pictures").rglob("*.png"))
    assert place.report(place.run, "--out", out, "--pictures", "some")[0] == 2


def test_failures_are_exit_code_3_with_their_reasons(place: Workplace) -> None:
    (place.images / "1.png").write_bytes(b"")
    code, said = place.attack()
    assert code == 3
    assert "1 failure(s); each is a row with its reason" in said
    assert "1.png: the file is empty (0 bytes)" in said


def test_a_checkpoint_that_is_not_there_is_exit_code_3_and_mended_by_weights(
    place: Workplace, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    from mjp_privacy import load_model

    config = place.write("two.yaml", tiny(models={"ViT": TINY, "MJP": TINY | {"checkpoint": None}}))
    code, said = place.attack(config=config)
    assert code == 3
    assert "MJP: FAILED" in said
    code, said = place.attack("--weights", "MJP=nowhere.pth", config=config)
    assert code == 3
    assert "No checkpoint at nowhere.pth" in said
    save_file(load_model(**TINY).state_dict(), tmp_path / "w.safetensors")
    code, said = place.attack("--weights", f"MJP={tmp_path / 'w.safetensors'}", config=config)
    assert code == 0
    assert set(rows(place.run)["status"]) == {"ok"}


def test_not_applicable_is_no_failure(place: Workplace) -> None:
    strict = one_cell(models={"ViT": TINY | {"position_embedding": "strict"}})
    assert place.attack(config=place.write("strict.yaml", strict))[0] == 0


def broken_zip(place: Workplace) -> Path:
    path = place.root / "broken.zip"
    path.write_bytes(b"PK\x03\x04 and then nothing")
    return path


def zip_without_images(place: Workplace) -> Path:
    path = place.root / "empty.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no image")
    return path


def folder_without_images(place: Workplace) -> Path:
    (place.root / "empty").mkdir()
    return place.root / "empty"


def wrong_labels(place: Workplace) -> Path:
    path = place.root / "labels.csv"
    path.write_text("file,label\n0.png,cat\n")
    return path


def list_config(place: Workplace) -> Path:
    path = place.root / "list.yaml"
    path.write_text("- name: x\n")
    return path


def a_file(place: Workplace) -> Path:
    (place.root / "file").write_text("x")
    return place.root / "file"


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("config", lambda p: p.root / "oen.yaml", "Did you mean"),
        ("config", lambda p: p.root / "none" / "x.yaml", "No config at"),
        ("config", list_config, "got list"),
        ("images", lambda p: p.root / "imagse", "Did you mean"),
        ("images", folder_without_images, "No image in"),
        ("images", broken_zip, "expected a readable zip of images"),
        ("images", zip_without_images, "No image in"),
        ("images", lambda p: "~nobody-of-this-name/images", "No folder or zip of images at"),
        ("images", a_file, "Expected a folder or a zip"),
        ("images", lambda p: None, "No images given: expected --images PATH"),
        ("labels", lambda p: p.root / "lables.csv", "No label file at"),
        ("labels", wrong_labels, "labels.csv"),
        ("limit", lambda p: 0, "Expected a limit of at least 1 image, got 0"),
        ("limit", lambda p: -3, "at least 1 image, got -3"),
        ("limit", lambda p: "few", "limit"),
        ("gamma", lambda p: 2, "--gamma is a share of the patches, 0 to 1; got 2"),
        ("gamma", lambda p: "nan", "0 to 1; got nan"),
        ("device", lambda p: "gpu", "device"),
        ("out", a_file, "--out"),
        ("out", lambda p: a_file(p) / "run", "--out"),
        ("outt", lambda p: p.run, "--outt"),
        ("weights", lambda p: "Vit=x.pth", "Unknown model 'Vit'. Did you mean ViT?"),
        ("block", lambda p: 0, "block: Input should be greater than or equal to 1; got 0"),
        ("client.batch", lambda p: 2, "block: a block holds whole client steps"),
        ("client.mode", lambda p: "test", "client.mode"),
        ("dtypes", lambda p: "float16", "dtypes"),
    ],
)
def test_a_mistake_is_exit_code_2_and_said(
    place: Workplace, argument: str, value: Callable[[Workplace], object], said: str
) -> None:
    code, printed = place.attack(**{argument: value(place)})
    assert code == 2
    assert said in " ".join(printed.split())
    assert not list(place.root.glob("run/rows/*"))


def test_without_out_a_run_is_in_results_under_its_name(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.root)
    code, said = place.attack(out=None)
    assert code == 0
    assert "3 images in 1 cell: results/tiny" in said
    assert cell(place.root / "results" / "tiny")["status"] == "ok"


def test_weights_given_twice_are_refused(place: Workplace) -> None:
    code, said = place.attack("--weights", "ViT=a.pth", "--weights", "ViT=b.pth")
    assert code == 2
    assert "--weights" in said
    assert "more than once" in said


def test_no_arguments_at_all(place: Workplace) -> None:
    for name, needed in (("attack", "config"), ("report", "--out")):
        code, said = place.command(name)
        assert code == 2
        assert needed in said.lower()


def test_reports_of_what_is_no_run(place: Workplace) -> None:
    out = place.root / "report"
    for run, expected in (
        (place.images, "is not a run folder"),
        (place.root / "nothing", "does not exist"),
        (place.config, "is a file"),
    ):
        code, said = place.report(run, "--out", out)
        assert (code, expected in said) == (2, True), said
    assert place.report("--out", out)[0] == 2
    place.attack()
    code, said = place.report(place.run, "--out", place.config)
    assert (code, "is a file" in said) == (2, True)


def test_other_pixels_are_exit_code_2(place: Workplace) -> None:
    place.attack()
    (place.images / "0.png").write_bytes((place.images / "1.png").read_bytes())
    code, said = place.attack()
    assert code == 2
    assert "had other pixels: 0.png" in said


def test_an_interrupt_says_that_the_same_command_goes_on(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_experiment", interrupted)
    code, said = place.attack()
    assert code == 130
    assert "the same command goes on from here" in said


# one command --------------------------------------------------------------------------------------


def test_the_overview_fits_a_screen_and_names_every_command(place: Workplace) -> None:
    code, said = place.command("--help")
    assert code == 0
    lines = said.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80 + 20  # the longest example may wrap
    assert all(f"  {name} " in said for name in COMMANDS)
    assert said.index("mjp demo") < said.index("Commands")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_commands_help_opens_with_its_example(place: Workplace, name: str) -> None:
    code, said = place.command(name, "--help")
    assert code == 0
    opening = " ".join(said.split("╭")[0].split())
    assert opening.startswith(f"usage: mjp {name} ")
    assert f"Example: mjp {COMMANDS[name].example}" in opening


def test_a_misspelt_command_gets_the_nearest(place: Workplace) -> None:
    code, said = place.command("atack")
    assert (code, "Did you mean attack?" in said) == (2, True)
    code, said = place.command()
    assert (code, said.strip()) == (2, overview())


def test_the_tab_key_completes_commands_options_and_stock_configs(place: Workplace) -> None:
    code, script = place.command("completion", "bash")
    assert code == 0
    for line, wanted in {
        "mjp fed": "federate",
        "mjp attack --publ": "--published-only",
        "mjp attack tabl": "table5 table5_finetuned table5_timm table5_vit_tiny",
        "mjp list def": "defenses",
    }.items():
        words = line.split()
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _mjp; echo ${{COMPREPLY[@]}}"
        said = subprocess.run(
            ["bash", "-c", script + ask], cwd=place.root, capture_output=True, text=True
        )
        assert said.stdout.split() == wanted.split(), said.stderr


def test_the_version(place: Workplace) -> None:
    assert place.command("--version") == (0, f"mjp-privacy {__version__}\n")


def test_the_overview_imports_nothing_heavy() -> None:
    code = "import sys; from mjp_privacy.cli import main; main(['--help']); print(*sys.modules)"
    loaded = process("-c", code).stdout.split()
    assert "mjp_privacy.cli" in loaded
    assert not {"torch", "numpy", "pandas", "tyro", "pydantic"} & set(loaded)


@pytest.mark.nightly
def test_output_that_nobody_reads_to_its_end_is_no_fault() -> None:
    script = f"{sys.executable} -m mjp_privacy list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "models\n"
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 141)


def test_every_name_is_listed_with_a_line(place: Workplace) -> None:
    code, said = place.command("list", "--json")
    assert code == 0
    listed = json.loads(said)
    assert listed.pop("schema") == "mjp-privacy/list/1"
    assert set(listed) == set(NAMES)
    assert all(line for names in listed.values() for line in names.values())
    assert set(listed["attacks"]) == {*ATTACKS, *CONTROLS}
    assert listed["defenses"]["int8"].startswith("Rounds each tensor to 255 even levels")
    assert len(set(listed["defenses"].values())) == len(listed["defenses"])  # each its own line
    assert "configs/demo.yaml" in listed["configs"]
    code, said = place.command("list", "engines")
    assert (code, said.splitlines()[0]) == (0, "engines")
    assert "several processes of this machine" in said
    assert "mjp federate --engine: Flower's simulation" in said
    code, said = place.command("list", "atacks")
    assert code == 2
    assert "Did you mean attacks? Available: models, attacks, defenses" in said


# as a process -------------------------------------------------------------------------------------


def process(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_scripts_pass_exit_codes_and_messages_on(place: Workplace) -> None:
    for argv in (("run_attack.py", place.root / "oen.yaml"), ("report.py", place.images)):
        done = process(*argv, "--out", place.root / "out")
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr

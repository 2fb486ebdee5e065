"""What is installed from the wheel and from the sdist holds all it needs, and attacks by name."""

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mjp_privacy", "attacks")


def built(kind: str, tree: Path, to: Path) -> Path:
    """The wheel or sdist of a tree, made without the network."""
    call = (sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(to))
    subprocess.run(call, cwd=tree, check=True, capture_output=True)
    return next(to.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The wheel of the tree, its sdist, and the wheel of what the sdist holds."""
    folder = tmp_path_factory.mktemp("packages")
    wheel = built("wheel", ROOT, folder / "wheel")
    sdist = built("sdist", ROOT, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    again = built("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder / "again")
    return {"wheel": wheel, "sdist": again}


def contents(wheel: Path) -> dict[str, int]:
    """The CRC of every file in a wheel, by its name."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def test_the_wheel_holds_every_file_of_the_packages_and_every_config(
    packages: Mapping[str, Path],
) -> None:
    held = contents(packages["wheel"])
    folders = {name: ROOT / name for name in PACKAGES} | {"mjp_privacy/configs": ROOT / "configs"}
    wanted = {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for name, folder in folders.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert wanted == {name for name in held if ".dist-info/" not in name}
    assert {"mjp_privacy/configs/demo.yaml", "mjp_privacy/configs/training/zoo.yaml"} <= wanted
    assert packages["wheel"].stat().st_size < 26 << 20
    assert contents(packages["sdist"]) == held


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("wheel", marks=pytest.mark.engine),
        pytest.param("sdist", marks=pytest.mark.nightly),
    ],
)
def test_an_installed_package_attacks_and_reports_in_an_empty_folder(
    packages: Mapping[str, Path], kind: str, tmp_path: Path
) -> None:
    """In an environment that has nothing of this checkout, without a home or the network."""
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", environment), check=True)
    python = environment / "bin" / "python"
    (library,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(packages[kind]) as archive:  # what pip does with a wheel of plain Python
        archive.extractall(library)
    # A path in a .pth file is searched last, and the .pth files behind it, of editable installs,
    # are not read.
    (library / "beside.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    can_unshare = not os.geteuid() and shutil.which("unshare")
    offline = ["unshare", "-n"] if can_unshare else []  # takes the network from a command

    def said(*words: str) -> str:
        clean = {"PATH": os.environ["PATH"], "HOME": str(empty), "PYTHONWARNINGS": "ignore"}
        call = [*offline, python, *words]
        done = subprocess.run(call, cwd=empty, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def mjp(*words: str) -> str:
        return said("-m", "mjp_privacy", *words)

    assert "configs/federated/minute.yaml" in mjp("list", "configs")
    page = empty / "results" / "demo" / "report" / "index.html"
    assert page.as_uri() in mjp("demo", "--limit", "1")  # attacks, and reports
    assert page.stat().st_size > 10_000
    place = said("-c", "import mjp_privacy, attacks; print(mjp_privacy.__file__)")
    assert Path(place.strip()).is_relative_to(environment)

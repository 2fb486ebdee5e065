"""tools/crash-test: a short round of it, and that it sees what is wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool's package."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import crash.main
    import crash.rot

    return crash


@pytest.fixture
def trial(crash: ModuleType, tmp_path: Path) -> object:
    """A trial whose undisturbed run is there."""
    place = crash.workplace.Workplace(tmp_path, images=3).prepare()
    made = crash.trial.Trial(place, Random(1), until=0.0)
    made.reference("attack")
    return made


@pytest.mark.nightly
def test_damage_is_mended_and_what_is_not_is_seen(
    crash: ModuleType, trial: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = crash.rot.rot(trial)
    assert line.tried == 3
    assert line.complaints == []
    assert line.cells[:3] == ["bits flipped", "attack", "3"]

    def changed(path: Path, _: object) -> None:
        """Rows as a forger writes them: whole, with a digest, and wrong."""
        from mjp_privacy.experiment.store import RunStore

        store = RunStore(Path(str(path).partition("/rows/")[0]))
        run_id, block = path.parent.name, int(path.stem)
        rows = store.read_rows(run_id)
        store.write_rows(run_id, block, rows.assign(value=rows["value"] + 1))

    [line] = crash.rot._damaged(_OfRows(trial), "rows changed", changed)
    assert any("wrong and shown, first row" in said for said in line.complaints)
    assert any("differ, first row" in said for said in line.complaints)


class _OfRows:
    """The trial, whose dice fall on files of rows."""

    def __init__(self, trial: object) -> None:
        self.trial = trial
        self.dice = self

    def __getattr__(self, name: str) -> object:
        return getattr(self.trial, name)

    def sample(self, files: list[Path], number: int) -> list[Path]:
        return [path for path in files if "/rows/" in str(path)][:number]


@pytest.mark.nightly
def test_a_stop_and_a_kill(crash: ModuleType, trial: object) -> None:
    place = trial.place  # type: ignore[attr-defined]
    out = place.root / "stopped"
    import signal

    with crash.processes.Running(place.words("attack", out)) as running:
        assert running.signal_after(0.3, signal.SIGTERM)
        ended = running.ended()
    assert (ended.code, ended.is_broken) == (143, False)
    with crash.processes.Running(place.words("attack", out)) as running:
        assert running.signal_after(0.3, signal.SIGKILL)
        assert running.ended().code == -9
    line = crash.figures.Figures("SIGKILL", "attack")
    trial.finish("attack", out, line)  # type: ignore[attr-defined]
    assert line.complaints == []
    shutil.rmtree(out / "reconstructions")
    trial.compare("attack", out, line)  # type: ignore[attr-defined]
    assert "differ, first picture" in line.complaints[0]


@pytest.mark.nightly
def test_the_table_and_the_command_line(crash: ModuleType) -> None:
    line = crash.figures.Figures("SIGKILL", "attack", tried=3)
    line.count("killed", 2)
    assert crash.figures.table([line]).splitlines()[-1] == (
        "| SIGKILL | attack | 3     | 2 killed | none  |"
    )
    line.complain("1 differs")
    assert line.cells[-1] == "1"
    script = ROOT / "tools" / "crash-test"
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "--seed" in shown.stdout
    refused = subprocess.run([sys.executable, script, "kill"], capture_output=True, text=True)
    assert refused.returncode == 2

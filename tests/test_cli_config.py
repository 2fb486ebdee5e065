"""`mjp attack`: the config's values as defaults, and what the command line puts in their place."""

from pathlib import Path

import pytest
import yaml

from tests.helpers.runs import cell, cells, one_cell, rows, tiny
from tests.helpers.workplace import Workplace


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Workplace:
    return Workplace(tmp_path, capsys)


def test_help_shows_the_configs_values_as_defaults(place: Workplace) -> None:
    config = one_cell(seed=41, dtypes=["float64"], images="my/pictures", client={"dal": True})
    path = place.write("mine.yaml", config)
    code, said = place.command("attack", path, "--help")
    assert code == 0
    said = " ".join(said.replace("│", " ").split())
    for default in ("default: 41", "default: 3", "default: float64", "default: my/pictures"):
        assert default in said
    assert "--client.dal, --client.no-dal" in said
    assert "(default: True)" in said
    for flag in ("--images", "--out", "--weights", "--labels", "--limit", "--gamma", "--device"):
        assert flag in said
    assert place.command("attack", "--help")[0] == 0
    assert place.command("report", "--help")[0] == 0


def test_overrides_replace_the_configs_values(place: Workplace) -> None:
    code, _ = place.attack("--client.dal", "--seed", 7, "--dtypes", "float64", "--block", 2)
    assert code == 0
    entry = cell(place.run)
    assert (entry["seed"], entry["dtype"]) == (7, "float64")
    written = yaml.safe_load((place.run / "experiment.yaml").read_text())["experiment"]
    assert (written["block"], written["client"]["dal"]) == (2, True)
    assert len(list(place.run.glob("rows/*/*.parquet"))) == 2


def test_what_is_not_overridden_is_the_configs_whatever_its_name(place: Workplace) -> None:
    """Also of a config without .yaml, and beside another argument that ends in .yaml."""
    content = one_cell(seed=41, dtypes=["float64"])
    plain = place.write("experiment", content)
    assert place.attack(config=plain, out=place.root / "plain")[0] == 0
    assert cell(place.root / "plain")["seed"] == 41
    out = place.root / "out.yaml"
    assert place.command(
        *("attack", "--out", out, "--images", place.images, plain, "--device", "cpu")
    )[0] == 0  # fmt: skip
    assert (cell(out)["seed"], cell(out)["dtype"]) == (41, "float64")


def test_gamma_and_limit_from_the_command_line(place: Workplace) -> None:
    config = place.write("tiny.yaml", tiny())
    assert place.attack(config=config, gamma=0.75, limit=2)[0] == 0
    assert [entry["gamma"] for entry in cells(place.run)] == [0, 0.75, 0, 0.75, 0.75]
    assert rows(place.run)["image_id"].nunique() == 2


def test_a_label_file_from_the_command_line(place: Workplace) -> None:
    (place.images / "labels.csv").rename(place.root / "mine.csv")
    assert place.attack(labels=place.root / "mine.csv")[0] == 0
    found = rows(place.run)
    assert set(found["label_source"]) == {"csv"}
    assert set(found.loc[found["metric"] == "top1", "status"]) == {"ok"}


def test_a_mistake_in_an_attack_names_the_file(place: Workplace) -> None:
    wrong = [{"name": "april"}, {"name": "april_prior", "options": {"prior": "station"}}]
    path = place.write("wrong.yaml", one_cell(name="other", attacks=wrong))
    code, said = place.attack(config=path)
    assert code == 2
    assert f"{path}, attacks.1: prior 'station': expected 'fitted'" in said

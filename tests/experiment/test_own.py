"""One model of one's own: `mjp attack own`, conditions in a grid, and stock configs by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mjp_privacy.experiment.conditions import decided
from mjp_privacy.experiment.run_folder import run_folder
from safetensors.torch import save_file

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import Experiment, expand
from mjp_privacy.experiment.config_files import find_config, load_experiment
from mjp_privacy.experiment.overrides import with_gamma, with_model_fields, with_weights
from tests.helpers.runs import TINY, cells, photographs

FACTS = {"mean": 0.5, "std": 0.5, "num_heads": 3}


def weights(folder: Path, facts: dict[str, Any] = FACTS, **changes: Any) -> Path:
    path = folder / "mine.safetensors"
    metadata = {key: json.dumps(value) for key, value in facts.items()}
    save_file(load_model(**{**TINY, **changes}).state_dict(), path, metadata)
    return path


def own(path: Path) -> Experiment:
    return with_weights(load_experiment("own"), (str(path),))


def lines(experiment: Experiment) -> list[tuple[str, float, str]]:
    return [(cell.setting, cell.gamma, cell.attack.title) for cell in expand(experiment)]


# conditions ---------------------------------------------------------------------------------------


def test_lines_under_mjp_are_left_out_of_a_model_that_cannot_mask(tmp_path: Path) -> None:
    experiment, remarks = decided(own(weights(tmp_path)))
    assert {setting for setting, _, _ in lines(experiment)} == {"a"}
    assert ("a", 0.0, "token_span") in lines(experiment)
    (remark,) = remarks
    assert remark.startswith("own: no unknown embedding (E_unk), so it cannot mask and its lines ")
    assert "(mask_locator, masked_span, pixel_lattice, multi_round (2), multi_round (6), " in remark


@pytest.mark.parametrize(
    ("trained", "gamma", "used"), [(None, None, 0.27), (0.5, None, 0.5), (0.5, 0.1, 0.1)]
)
def test_a_model_that_can_mask_is_shuffled_as_it_was_trained(
    tmp_path: Path, trained: float | None, gamma: float | None, used: float
) -> None:
    facts = FACTS if trained is None else FACTS | {"trained_gamma": trained}
    experiment = own(weights(tmp_path, facts, unknown_embedding=True))
    if gamma is not None:
        experiment = with_gamma(experiment, gamma)
    experiment, remarks = decided(experiment)
    under_mjp = [line for line in lines(experiment) if line[0] == "c"]
    assert {gamma for _, gamma, _ in under_mjp} == {used}
    assert {"pixel_lattice", "multi_round (6)", "plain_step"} <= {line[2] for line in under_mjp}
    said = ("own: gamma 0.5, as it was trained; --gamma replaces it",)
    assert remarks == (said if trained and gamma is None else ())


def test_a_condition_chooses_among_models_and_needs_one() -> None:
    models = {"ViT": TINY, "MJP": {**TINY, "unknown_embedding": True}}
    entry = {"models": ["ViT", "MJP"], "settings": ["b"], "only_with": "unknown_embedding"}
    chosen, _ = decided(load_experiment({"name": "x", "models": models, "grid": [entry]}))
    assert [cell.model for cell in expand(chosen)] == ["MJP"]
    entry["models"] = ["ViT"]
    alone = load_experiment({"name": "x", "models": {"ViT": TINY}, "grid": [entry]})
    with pytest.raises(UserError, match="Nothing is left of the grid of 'x': ViT: no unknown emb"):
        decided(alone)


def test_without_conditions_nothing_is_read() -> None:
    experiment = load_experiment("ladder")
    assert decided(experiment) == (experiment, ())


# the command --------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    photographs(tmp_path / "images", 1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def attack(*argv: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["attack", *map(str, argv), "--images", "images", "--device", "cpu"])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_file_of_ones_own_from_anywhere(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = weights(place)
    code, said = attack("own", "--weights", path, capsys=capsys)
    assert code == 0
    assert "1 image in 8 cells: results/own/mine" in said
    assert "own: no unknown embedding" in said
    assert {entry["status"] for entry in cells(place / "results/own/mine")} == {"ok"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "mine.safetensors: num_heads, mean, std cannot be read off the checkpoint and are "),
        ([], "to `mjp attack` as --num-heads, --mean, --std."),
        (["--mean", "0.5", "--std", "0.5"], "`mjp attack` as --num-heads."),
        (
            ["--mean", "0.5", "0.5"],
            "--mean: expected one number or three, one per channel; got 0.5 0",
        ),
        (
            ["--model", "vit_tiny_patch16_224", "--mean", "0.5", "--std", "0.5"],
            "mine.safetensors: patch 8, depth 1; vit_tiny_patch16_224: patch 16, depth 12. Expect",
        ),
        (
            ["--mean", "0.5", "--std", "0.5", "--num-heads", "3", "--img-size", "36"],
            "(mine.safetensors: width 192, patch 8; config: img_size 36, num_heads 3)",
        ),
    ],
)
def test_what_a_file_lacks_is_one_sentence(
    place: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    code, printed = attack("own", "--weights", weights(place, {}), *options, capsys=capsys)
    assert code == 2
    assert said in printed
    assert not (place / "results").exists()


def test_the_stock_ladder_names_both_sides_of_a_mismatch(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of its models can be loaded, so nothing is begun."""
    code, said = attack("ladder_vit", "--weights", weights(place), capsys=capsys)
    assert code == 2
    assert not (place / "results").exists()
    assert "mine.safetensors: patch 8, depth 1; vit_tiny_patch16_224: patch 16, depth 12." in said


def test_options_of_a_model_say_nothing_of_recorded_uploads(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attack", "uploads", "--uploads", "x", "--img-size", "64"]) == 2
    said = capsys.readouterr().err
    assert "--img-size says nothing of recorded uploads" in said


# names and folders --------------------------------------------------------------------------------


def test_stock_configs_have_names(place: Path) -> None:
    assert load_experiment("demo").name == "demo"
    (place / "configs").mkdir()
    mine = place / "configs" / "demo.yaml"
    mine.write_text("name: mine\n")
    assert find_config("demo") == Path("configs/demo.yaml")
    (place / "demo").write_text("name: nearer\n")
    assert find_config("demo") == Path("demo")
    assert find_config("configs/demo.yaml") == Path("configs/demo.yaml")
    with pytest.raises(UserError) as caught:
        load_experiment("ladderr")
    assert str(caught.value).startswith(
        "No config 'ladderr': expected a YAML file, or the name of a stock config. Did you mean "
        "ladder? Stock configs: "
    )


def test_help_of_a_stock_config_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["attack", "demo", "--help"])
    assert "float32 float64" in " ".join(capsys.readouterr().out.split())


def test_runs_have_a_folder(tmp_path: Path) -> None:
    own_config, ladder = load_experiment("own"), load_experiment("ladder")
    folders = {
        "results/own": run_folder(own_config, []),
        "results/own/vit": run_folder(own_config, ["a/vit.pth"]),
        "results/own/J": run_folder(own_config, ["results/J/model.safetensors"]),
        "results/own/cifar_vit": run_folder(own_config, ["packaged:cifar_vit"]),
        "results/ladder": run_folder(ladder, ["vit.safetensors"]),
    }
    assert {str(folder.path) for folder in folders.values()} == set(folders)


def test_fields_of_all_models() -> None:
    changed = with_model_fields(
        load_experiment("ladder_vit"), {"img_size": 96, "mean": (0.1, 0.2, 0.3), "std": (0.5,)}
    )
    for model in changed.models.values():
        assert (model.img_size, model.mean, model.std) == (96, (0.1, 0.2, 0.3), 0.5)
        assert model.model == "vit_tiny_patch16_224"
    same = load_experiment("ladder_vit")
    assert with_model_fields(same, {"model": None, "mean": (), "num_heads": None}) == same

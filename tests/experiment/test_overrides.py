"""What the command line and conditions in a grid change in a config."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import Experiment, expand, load_experiment
from mjp_privacy.experiment.overrides import (
    decided,
    idle_attacks,
    unreached,
    with_gamma,
    with_published_attacks,
    with_weights,
)
from tests.helpers.runs import TINY, cells, photographs


def config(*grid: dict[str, Any], **models: dict[str, Any]) -> Any:
    named = models or {"ViT": {}, "MJP": {}}
    return load_experiment({"name": "x", "models": named, "grid": list(grid)})


def lines(experiment: Any) -> list[tuple[Any, ...]]:
    return [(c.model, c.setting, c.gamma, c.client.batch, c.note) for c in expand(experiment)]


def test_cells_that_become_equal_stand_once_where_the_first_stood() -> None:
    both = config(
        {"models": ["ViT"], "settings": ["a", "b"], "gammas": [0.1, 0.2], "note": "first"},
        {"models": ["MJP", "ViT"], "settings": ["b"], "gammas": [0.3], "note": "second"},
    )
    assert lines(with_gamma(both, 0.5)) == [
        ("ViT", "a", 0.0, 1, "first"),
        ("ViT", "b", 0.5, 1, "first"),
        ("MJP", "b", 0.5, 1, "second"),
    ]


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_gamma_out_of_range_is_refused(gamma: float) -> None:
    with pytest.raises(UserError, match="--gamma"):
        with_gamma(config({"models": ["ViT"], "settings": ["b"]}), gamma)


def test_published_attacks_alone_leave_the_papers_rows() -> None:
    table5 = with_published_attacks(load_experiment("configs/table5.yaml"))
    cells = expand(table5)
    assert {cell.attack.title for cell in cells} == {"april"}
    shuffled = [c.gamma for c in cells if c.setting != "a"]
    assert shuffled == [0.9] * 6 + [0.27] * 6  # rows 5 to 10 of the paper, twice
    assert sum(cell.setting == "a" for cell in cells) == 4


# checkpoints --------------------------------------------------------------------------------------


def checkpoints(*weights: str, **models: dict[str, Any]) -> dict[str, str | None]:
    given = config({"models": [next(iter(models), "ViT")], "settings": ["a"]}, **models)
    return {name: model.checkpoint for name, model in with_weights(given, weights).models.items()}


def test_weights_for_all_by_name_and_both() -> None:
    assert checkpoints() == {"ViT": None, "MJP": None}
    assert checkpoints("a.pth") == {"ViT": "a.pth", "MJP": "a.pth"}
    assert checkpoints("MJP=a.pth", "ViT=b.pth") == {"ViT": "b.pth", "MJP": "a.pth"}
    for order in (("a.pth", "MJP=b.pth"), ("MJP=b.pth", "a.pth")):
        assert checkpoints(*order) == {"ViT": "a.pth", "MJP": "b.pth"}


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        (["MPJ=a.pth"], ["MPJ", "MJP", "ViT"]),
        (["runs/lr=0.1/a.pth"], ["runs/lr"]),
        (["MJP="], ["MJP", "none"]),
        ([""], ["all models", "none"]),
        (["MJP=a.pth", "MJP=b.pth"], ["MJP", "two"]),
        (["a.pth", "b.pth"], ["all models", "two"]),
    ],
)
def test_wrong_weights_are_named(weights: list[str], named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        checkpoints(*weights)
    assert all(name in str(caught.value) for name in named), caught.value


# options that entries of the grid do not take ----------------------------------------------------


PLAIN: Mapping[str, Any] = {"models": ["ViT"], "settings": ["a"]}


def grid(*entries: Mapping[str, Any], **client: Any) -> Experiment:
    """A grid of these entries, and the client as the command line has changed it."""
    loaded = config(*(PLAIN | entry for entry in entries), ViT={"model": "cifar_vit"})
    return dataclasses.replace(loaded, client=dataclasses.replace(loaded.client, **client))


@pytest.mark.parametrize("word", [["--client.batch", "4"], ["--client.batch=4"]])
def test_entries_with_their_own_value_are_counted(word: list[str]) -> None:
    given = grid({}, {"client": {"batch": 2}}, {"client": {"batch": 10, "dal": True}}, batch=4)
    (note,) = unreached(["planted.yaml", *word, "--limit", "3"], given)
    assert all(words in note for words in ("--client.batch", "2 of", "3 entries", "2, 10")), note


def test_an_attack_that_no_entry_takes_is_named() -> None:
    content = {"name": "x", "models": {"ViT": {"model": "cifar_vit"}}}
    content["attacks"] = [{"name": "april"}, {"name": "patch_gradient", "label": "solved"}]
    lacking = load_experiment({**content, "grid": [{**PLAIN, "attacks": ["april"]}]})
    (note,) = idle_attacks(lacking)
    assert "solved" in note
    assert "april" not in note
    assert idle_attacks(load_experiment({**content, "grid": [dict(PLAIN)]})) == []


def test_an_option_that_changes_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = grid({"client": {"batch": 2}}, {"client": {"batch": 10}}, batch=4)
    with pytest.raises(UserError, match=r"--client\.batch.* 2, 10"):
        unreached(["--client.batch", "4"], given)
    assert main(["attack", "batch_matching", "--client.batch", "8"]) == 2
    assert "--client.batch" in capsys.readouterr().err


# conditions ---------------------------------------------------------------------------------------


FACTS = {"mean": 0.5, "std": 0.5, "num_heads": 3}


def weights(folder: Path, facts: Mapping[str, Any] = FACTS, **changes: Any) -> Path:
    path = folder / "mine.safetensors"
    metadata = {key: json.dumps(value) for key, value in facts.items()}
    save_file(load_model(**{**TINY, **changes}).state_dict(), path, metadata)
    return path


def own(path: Path) -> Experiment:
    return with_weights(load_experiment("own"), (str(path),))


def cell_lines(experiment: Experiment) -> list[tuple[str, float, str]]:
    return [(cell.setting, cell.gamma, cell.attack.title) for cell in expand(experiment)]


def test_lines_under_mjp_are_left_out_of_a_model_that_cannot_mask(tmp_path: Path) -> None:
    experiment, (remark,) = decided(own(weights(tmp_path)))
    assert {setting for setting, _, _ in cell_lines(experiment)} == {"a"}
    assert ("a", 0.0, "token_span") in cell_lines(experiment)
    assert all(name in remark for name in ("own", "E_unk", "mask_locator", "multi_round (6)"))


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
    under_mjp = [line for line in cell_lines(experiment) if line[0] == "c"]
    assert {gamma for _, gamma, _ in under_mjp} == {used}
    assert {"pixel_lattice", "multi_round (6)", "plain_step"} <= {line[2] for line in under_mjp}
    assert [("own" in r, "0.5" in r) for r in remarks] == [(True, True)] * (used == trained)


def test_a_condition_chooses_among_models_and_needs_one() -> None:
    models = {"ViT": TINY, "MJP": {**TINY, "unknown_embedding": True}}
    entry = {"models": ["ViT", "MJP"], "settings": ["b"], "only_with": "unknown_embedding"}
    chosen, _ = decided(load_experiment({"name": "x", "models": models, "grid": [entry]}))
    assert [cell.model for cell in expand(chosen)] == ["MJP"]
    alone = {"name": "x", "models": {"ViT": TINY}, "grid": [entry | {"models": ["ViT"]}]}
    with pytest.raises(UserError, match="ViT"):
        decided(load_experiment(alone))


# a model of one's own -----------------------------------------------------------------------------


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
    code, said = attack("own", "--weights", weights(place), capsys=capsys)
    assert code == 0
    assert "results/own/mine" in said
    (out,) = (place / "results/own").glob("mine-*")
    assert {entry["status"] for entry in cells(out)} == {"ok"}


KNOWN = ["--mean", "0.5", "--std", "0.5"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], ["num_heads", "mean", "std", "--num-heads", "--mean", "--std"]),
        (KNOWN, ["--num-heads"]),
        (["--mean", "0.5", "0.5"], ["--mean", "0.5 0.5"]),
        (["--model", "vit_tiny_patch16_224", *KNOWN], ["patch 8", "depth 1", "patch 16"]),
        ([*KNOWN, "--num-heads", "3", "--img-size", "36"], ["patch 8", "img_size 36"]),
    ],
)
def test_what_a_file_lacks_is_named_before_anything_is_begun(
    place: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: list[str]
) -> None:
    code, said = attack("own", "--weights", weights(place, {}), *options, capsys=capsys)
    assert code == 2
    assert all(name in said for name in named), said
    assert not (place / "results").exists()


@pytest.mark.parametrize(
    "options",
    [
        *(["--img-size", "64"], ["--gamma", "0.5"], ["--client.defenses", "int8"]),
        *(["--weights", "a.pth"], ["--model", "vit"], ["--labels", "a.csv"]),
        *(["--images", "photographs"], ["--images", "embedded"], ["--dtypes", "float64"]),
        ["--client.batch", "2"],
    ],
)
def test_options_of_simulated_clients_say_nothing_of_recorded_uploads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    run = tmp_path / "run"
    assert main(["attack", "uploads", "--uploads", "x", "--out", str(run), *options]) == 2
    assert options[0].partition(".")[0] in capsys.readouterr().err
    assert not run.exists()

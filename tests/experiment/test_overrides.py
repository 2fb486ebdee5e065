"""What the command line lays over a config, where it collides with what stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import expand
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.overrides import with_gamma, with_published_attacks, with_weights


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


def test_cells_of_other_clients_stay_apart() -> None:
    entry = {"models": ["ViT"], "settings": ["b"]}
    both = config(entry, entry | {"client": {"batch": 2}}, entry | {"client": {"batch": 1}})
    assert [line[3] for line in lines(with_gamma(both, 0.5))] == [1, 2]


def checkpoints(experiment: Any) -> dict[str, str | None]:
    return {name: model.checkpoint for name, model in experiment.models.items()}


def test_a_models_own_checkpoint_goes_before_the_one_for_all() -> None:
    given = config({"models": ["ViT"], "settings": ["a"]})
    for weights in (("all.pth", "MJP=own.pth"), ("MJP=own.pth", "all.pth")):
        assert checkpoints(with_weights(given, weights)) == {"ViT": "all.pth", "MJP": "own.pth"}
    assert checkpoints(with_weights(given, ())) == {"ViT": None, "MJP": None}


@pytest.mark.parametrize("weights", [("a.pth", "b.pth"), ("MJP=a.pth", "MJP=b.pth"), ("MJP=",)])
def test_two_or_no_checkpoints_for_one_model_are_refused(weights: tuple[str, ...]) -> None:
    given = config({"models": ["ViT"], "settings": ["a"]})
    with pytest.raises(UserError, match=r"expected one checkpoint for .*, got (two|none)"):
        with_weights(given, weights)


def test_the_longest_name_that_fits_is_meant(tmp_path: Path) -> None:
    names = {"M": {}, "M=1": {}}
    given = config({"models": ["M"], "settings": ["a"]}, **names)
    assert checkpoints(with_weights(given, ("M=1=x.pth",))) == {"M": None, "M=1": "x.pth"}
    odd = tmp_path / "a=b.pth"
    odd.write_bytes(b"")
    assert set(checkpoints(with_weights(given, (str(odd),))).values()) == {str(odd)}
    with pytest.raises(UserError, match="Unknown model 'N'"):
        with_weights(given, ("N=x.pth",))


def test_published_attacks_alone_leave_the_papers_rows() -> None:
    table5 = with_published_attacks(load_experiment("configs/table5.yaml"))
    cells = expand(table5)
    assert {cell.attack.title for cell in cells} == {"april"}
    shuffled = [c.gamma for c in cells if c.setting != "a"]
    assert shuffled == [0.9] * 6 + [0.27] * 6  # rows 5 to 10 of the paper, twice
    assert sum(cell.setting == "a" for cell in cells) == 4


def test_an_experiment_without_a_published_attack_is_refused() -> None:
    entry = {"models": ["ViT"], "settings": ["a"]}
    given = load_experiment(
        {"name": "x", "models": {"ViT": {}}, "grid": [entry], "attacks": [{"name": "grey"}]}
    )
    with pytest.raises(UserError, match=r"--published-only: 'x' has no attack .* april"):
        with_published_attacks(given)

"""Configs: what the shipped ones hold, and that every mistake is named."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mjp_privacy.experiment.provenance import write_provenance

from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import Experiment, expand
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.overrides import with_gamma, with_weights
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.models.zoo import NAMED_MODELS
from mjp_privacy.report.published import published_row

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))


def small(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": "small",
        "models": {"plain": {"checkpoint": "random"}, "mjp": {"model": "deit_small_mjp"}},
        "grid": [{"models": ["plain"], "settings": ["a"]}, {"models": ["mjp"], "settings": ["b"]}],
    }
    return content | changes


def entry(**changes: Any) -> dict[str, Any]:
    """With this first entry in the grid."""
    good = small()["grid"]
    return small(grid=[good[0] | changes, good[1]])


def mistake(content: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_experiment(content)
    return str(caught.value)


# shipped configs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_parse_and_open_with_their_command(path: Path) -> None:
    experiment = load_experiment(path)
    assert experiment.name == path.stem
    head = path.read_text().split("\nname:")[0]
    assert f"mjp attack configs/{path.name}" in head
    assert "Time: " in head
    assert "Expected: " in head
    assert {cell.model for cell in expand(experiment)} == set(experiment.models)


def cell_names(experiment: Experiment) -> list[tuple[Any, ...]]:
    cells = expand(experiment)
    return [(c.model, c.setting, c.gamma, c.dtype, c.attack.title) for c in cells]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
@pytest.mark.parametrize("gamma", [None, 0.0, 0.27, 0.9])
def test_shipped_configs_hold_every_cell_once(path: Path, gamma: float | None) -> None:
    experiment = load_experiment(path)
    changed = experiment if gamma is None else with_gamma(experiment, gamma)
    names = cell_names(changed)
    whole = [(*n, c.client) for n, c in zip(names, expand(changed), strict=True)]
    assert len(set(whole)) == len(whole)
    if gamma is not None:
        assert {name[2] for name in names} <= {0.0, gamma}
        kinds = {(*name[:2], *name[3:]) for name in cell_names(experiment)}
        assert {(*name[:2], *name[3:]) for name in names} == kinds


def test_table5_is_the_papers_ten_rows_in_its_order() -> None:
    experiment = load_experiment(CONFIGS / "table5.yaml")
    cells = [c for c in expand(experiment) if c.attack.name == "april" and c.gamma in (0, 0.27)]
    rows = [(c.model, c.setting, c.gamma) for c in cells]
    intact = ["ViT-S", "DeiT-S", "DeiT-S (w/o PEs)", "DeiT-S+MJP"]
    assert rows == [
        *((model, "a", 0.0) for model in intact),
        *((model, "b", 0.27) for model in intact),
        ("DeiT-S+MJP (w/o)", "b", 0.27),
        ("DeiT-S+MJP", "c", 0.27),
    ]
    for cell in cells:
        paper = experiment.models[cell.model].paper
        setting = cell.paper_setting or cell.setting
        assert paper is not None
        assert published_row(paper, setting).label, (paper, setting)
    printed = {(experiment.models[c.model].paper, c.paper_setting or c.setting) for c in cells}
    assert len(printed) == 10
    assert {(c.model, c.setting) for c in expand(experiment) if c.gamma == 0.9} == {
        (model, setting) for model, setting, gamma in rows if gamma
    }
    without = next(c for c in cells if c.model == "DeiT-S+MJP (w/o)")
    assert without.paper_setting == "a"
    assert without.note is not None
    assert {c.dtype for c in cells} == {"float32"}


def test_the_demo_needs_nothing_from_outside() -> None:
    experiment = load_experiment(CONFIGS / "demo.yaml")
    assert experiment.images == "embedded"
    assert all(model.checkpoint is None for model in experiment.models.values())
    for name in {model.model for model in experiment.models.values()}:
        assert (NAMED_MODELS[str(name)].checkpoint or "").startswith("packaged:")
    assert {cell.dtype for cell in expand(experiment)} == {"float32", "float64"}
    assert {cell.setting for cell in expand(experiment)} == {"a", "b", "c"}


# what a config means ------------------------------------------------------------------------------


def test_cells_are_the_product_of_an_entrys_lists_in_order() -> None:
    grid = [{"models": ["plain", "mjp"], "settings": ["a", "b"], "gammas": [0.1, 0.9]}]
    experiment = load_experiment(small(grid=grid, dtypes=["float32", "float64"]))
    assert cell_names(experiment) == [
        (model, setting, gamma, dtype, "april")
        for model in ("plain", "mjp")
        for setting, gamma in (("a", 0.0), ("b", 0.1), ("b", 0.9))
        for dtype in ("float32", "float64")
    ]


def test_an_entry_may_choose_among_the_attacks() -> None:
    attacks = [{"name": "april"}, {"name": "april_unk_aware"}]
    grid = [
        {"models": ["mjp"], "settings": ["b"]},
        {"models": ["plain"], "settings": ["a"], "attacks": ["april"]},
    ]
    experiment = load_experiment(small(grid=grid, attacks=attacks))
    assert [(name[0], name[4]) for name in cell_names(experiment)] == [
        ("mjp", "april"),
        ("mjp", "april_unk_aware"),
        ("plain", "april"),
    ]


def test_an_experiment_is_frozen_and_checked_again() -> None:
    experiment = load_experiment(small())
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.seed = 1  # type: ignore[misc]
    assert load_experiment(experiment) is experiment
    assert "grid: expected at least one entry" in mistake(dataclasses.replace(experiment, grid=()))
    with pytest.raises(UserError, match="Experiment has 1 mistake") as caught:
        dataclasses.replace(experiment, block=0)
    assert "block: Input should be greater than or equal to 1; got 0" in str(caught.value)


# mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (small(sed=1), "sed: unknown field. Did you mean seed?"),
        (small(zzz=1), "zzz: unknown field. Known: attacks, block, classes"),
        (
            small(models={"plain": {"chekpoint": "x"}}),
            "models.plain.chekpoint: unknown field. Did you mean checkpoint?",
        ),
        (entry(setings=["a"]), "grid.0.setings: unknown field. Did you mean settings?"),
        (
            small(attacks=[{"name": "april", "option": {}}]),
            "attacks.0.option: unknown field. Did you mean options?",
        ),
        (small(client={"bacth": 1}), "client.bacth: unknown field. Did you mean batch?"),
        ({"attacks": [{"name": "april"}]}, "name: this field is needed"),
        ({"name": "x", "models": {"ViT": {}}}, "grid: expected at least one entry"),
        (small(grid=[{"models": ["plain"]}]), "grid.0.settings: this field is needed"),
        (entry(models=["plan"]), "grid.0: Unknown model 'plan'. Did you mean plain?"),
        (entry(attacks=["aprl"]), "Unknown attack 'aprl'. Did you mean april?"),
        (
            entry(attacks=["april"]) | {"attacks": [{"name": "aprill"}]},
            "attacks.0: Unknown attack 'aprill'. Did you mean april?",
        ),
        (entry(settings=["d"]), "Input should be 'a', 'b' or 'c'; got 'd'"),
        (entry(settings="a"), "grid.0.settings: Input should be a valid tuple; got 'a'"),
        (small(dtypes=["float16"]), "should be 'float32' or 'float64'; got 'float16'"),
        (small(seed="zero"), "seed: Input should be a valid integer"),
        (small(seed=0.5), "seed: Input should be a valid integer"),
        (small(name=5), "name: Input should be a valid string"),
        (small(models=["plain"]), "models: Input should be a valid dictionary"),
        (small(models={"plain": None}), "models.plain: Input should be named fields"),
        (small(models={1: {}}), "models.1"),
        (small(client={"mode": "test"}), "client.mode: Input should be 'eval' or 'train'"),
        (small(models={"plain": {"mean": "half"}}), "models.plain.mean"),
        (small(models={"plain": {"mean": [0.5, 0.5]}}), "models.plain.mean"),
        (
            entry(gammas=[1.01]),
            "grid.0.gammas.0: Input should be less than or equal to 1; got 1.01",
        ),
        (entry(gammas=[-0.1]), "Input should be greater than or equal to 0; got -0.1"),
        (entry(gammas=[float("nan")]), "grid.0.gammas.0: "),
        (small(grid=[]), "grid: expected at least one entry"),
        (small(dtypes=[]), "dtypes: expected at least one entry"),
        (small(attacks=[]), "attacks: expected at least one entry"),
        (entry(models=[]), "grid.0.models: expected at least one entry"),
        (entry(settings=[]), "grid.0.settings: expected at least one entry"),
        (entry(gammas=[]), "grid.0.gammas: expected at least one entry"),
        (entry(attacks=[]), "grid.0.attacks: expected at least one entry"),
        (small(models={"plain": {"trained_gamma": float("nan")}}), "plain.trained_gamma: "),
        (
            small(client={"dal_lambda": float("nan")}),
            "client.dal_lambda: Input should be a finite number; got nan",
        ),
        (
            small(client={"dal_lambda": -1}),
            "client.dal_lambda: Input should be greater than or equal to 0; got -1",
        ),
        (small(block=0), "block: Input should be greater than or equal to 1; got 0"),
        (
            small(client={"batch": 0}),
            "client.batch: Input should be greater than or equal to 1; got 0",
        ),
        (small(block=20, client={"batch": 3}), "a multiple of client.batch (3), got 20"),
        ({1: 2}, "mistake"),
    ],
)
def test_a_mistake_is_named_with_what_came_and_what_is_near(
    content: dict[Any, Any], said: str
) -> None:
    message = mistake(content)
    assert said in message
    assert message.startswith("the config")


def test_every_mistake_is_named_at_once() -> None:
    message = mistake(small(sed=1, blok=2, seed="x"))
    assert "the config has 3 mistake(s)" in message


def test_a_block_holds_whole_steps() -> None:
    assert load_experiment(small(block=20, client={"batch": 4})).client.batch == 4


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([field.name for field in dataclasses.fields(Experiment)]), trees)
def test_any_content_is_an_experiment_or_a_user_error(field: str, value: Any) -> None:
    with contextlib.suppress(UserError):
        load_experiment(small(**{field: value}))


# files --------------------------------------------------------------------------------------------


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "given.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- name: x\n", "got list"),
        ("", "got an empty file"),
        ("just words", "got str"),
        ("name: [x\n", "not valid YAML"),
        ("name: x\n---\nname: y\n", "not valid YAML"),
        (b"name: \xff\xfe\n", "what cannot be read (UnicodeDecodeError"),
        ("name: x\nseed: 2024-13-45\n", "not valid YAML"),
        ("name: x\nname: y\n", "line 2: 'name' is given twice"),
        ("models:\n  A: {}\n  B: {}\n  A: {}\n", "line 4: 'A' is given twice"),
        ("name: x\nmodels: &a\n  A: *a\n", "an anchor that holds itself"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = written(tmp_path, content)
    assert said in mistake(path)
    assert str(path) in mistake(path)


def test_anchors_and_merges_are_no_repetitions(tmp_path: Path) -> None:
    content = """
name: merged
models:
  A: &a {checkpoint: random, img_size: 32}
  B: &b {<<: *a, img_size: 64}
  C: {<<: *b, img_size: 96, seed: 1}
grid:
  - &first {models: [A], settings: [a]}
  - {<<: *first, models: [C]}
"""
    experiment = load_experiment(written(tmp_path, content))
    sizes = [(model.img_size, model.seed) for model in experiment.models.values()]
    assert sizes == [(32, 0), (64, 0), (96, 1)]


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!!python/tuple", "!mine"]
)
def test_tags_that_make_objects_are_refused(tmp_path: Path, tag: str) -> None:
    mark = tmp_path / "executed"
    path = written(tmp_path, f"name: {tag} ['touch {mark}']\n")
    assert "not valid YAML" in mistake(path)
    assert not mark.exists()


def test_a_path_that_is_not_there_suggests_one_that_is(tmp_path: Path) -> None:
    (tmp_path / "table5.yaml").write_text("name: x")
    assert f"Did you mean {tmp_path / 'table5.yaml'}?" in mistake(tmp_path / "tabel5.yaml")
    assert "No config at" in mistake(tmp_path / "nowhere" / "table5.yaml")
    assert "expected a YAML file" in mistake(tmp_path)


def test_a_config_survives_its_own_yaml(tmp_path: Path) -> None:
    content = small(seed=3, client={"dal": True})
    assert load_experiment(written(tmp_path, yaml.safe_dump(content))) == load_experiment(content)


def test_what_a_run_wrote_of_itself_is_its_config(tmp_path: Path) -> None:
    experiment = load_experiment("demo")
    store = RunStore(tmp_path)
    write_provenance(store, experiment, {"commit": "abc"})
    assert load_experiment(tmp_path / "experiment.yaml") == experiment


# the command line's changes -----------------------------------------------------------------------


def test_gamma_replaces_that_of_b_and_c_and_leaves_a() -> None:
    grid = [{"models": ["plain", "mjp"], "settings": ["a", "b"], "gammas": [0.1, 0.9]}]
    changed = with_gamma(load_experiment(small(grid=grid)), 0.5)
    assert [name[:3] for name in cell_names(changed)] == [
        ("plain", "a", 0.0),
        ("plain", "b", 0.5),
        ("mjp", "a", 0.0),
        ("mjp", "b", 0.5),
    ]


def test_cells_that_gamma_makes_equal_are_kept_once_with_their_notes() -> None:
    first = {"models": ["mjp"], "settings": ["b"], "note": "first", "paper_setting": "a"}
    second = {"models": ["plain", "mjp"], "settings": ["b"], "gammas": [0.9], "note": "second"}
    grid = [first, second]
    cells = expand(with_gamma(load_experiment(small(grid=grid)), 0.5))
    assert [(c.model, c.note, c.paper_setting) for c in cells] == [
        ("mjp", "first", "a"),
        ("plain", "second", None),
    ]


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_gamma_out_of_range_is_refused(gamma: float) -> None:
    with pytest.raises(UserError, match="--gamma is a share of the patches, 0 to 1"):
        with_gamma(load_experiment(small()), gamma)


def checkpoints(*weights: str, models: Any = None) -> dict[str, str | None]:
    content = small()
    if models:
        content |= {"models": models, "grid": [{"models": [*models], "settings": ["a"]}]}
    changed = with_weights(load_experiment(content), weights)
    return {name: model.checkpoint for name, model in changed.models.items()}


def test_weights_for_all_by_name_and_both() -> None:
    assert checkpoints() == {"plain": "random", "mjp": None}
    assert checkpoints("a.pth") == {"plain": "a.pth", "mjp": "a.pth"}
    assert checkpoints("mjp=a.pth") == {"plain": "random", "mjp": "a.pth"}
    assert checkpoints("mjp=a.pth", "plain=b.pth") == {"plain": "b.pth", "mjp": "a.pth"}
    for order in (("a.pth", "mjp=b.pth"), ("mjp=b.pth", "a.pth")):
        assert checkpoints(*order) == {"plain": "a.pth", "mjp": "b.pth"}


def test_names_and_paths_may_hold_equal_signs(tmp_path: Path) -> None:
    assert checkpoints("mjp=runs/lr=0.1/a.pth")["mjp"] == "runs/lr=0.1/a.pth"
    path = tmp_path / "lr=0.1.pth"
    path.touch()
    assert checkpoints(str(path)) == {"plain": str(path), "mjp": str(path)}
    named = {"γ": {}, "γ=0.9": {}}
    assert checkpoints("γ=0.9=a.pth", models=named) == {"γ": None, "γ=0.9": "a.pth"}
    assert checkpoints("γ=b.pth", models=named) == {"γ": "b.pth", "γ=0.9": None}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (["mpj=a.pth"], "Unknown model 'mpj'. Did you mean mjp? Available: plain, mjp"),
        (["runs/lr=0.1/a.pth"], "not a file, and read as NAME=PATH: Unknown model 'runs/lr'"),
        (["mjp="], "expected one checkpoint for mjp, got none"),
        ([""], "expected one checkpoint for all models, got none"),
        (["mjp=a.pth", "mjp=b.pth"], "expected one checkpoint for mjp, got two"),
        (["a.pth", "b.pth"], "expected one checkpoint for all models, got two"),
    ],
)
def test_wrong_weights_are_named(weights: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        checkpoints(*weights)
    assert said in str(caught.value)

"""Configs: what one means, what a command line changes in it, and that every mistake is named."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from mjp_privacy import load_model
from mjp_privacy.cli import main
from mjp_privacy.client.config import ClientConfig, client_identity, client_recipe
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import parse
from mjp_privacy.experiment.cell_facts import cell_key, describe, run_id
from mjp_privacy.experiment.config import (
    AttackConfig,
    ClassChoice,
    Experiment,
    GridEntry,
    ModelConfig,
    expand,
    load_experiment,
)
from mjp_privacy.experiment.engines.options import EngineConfig
from mjp_privacy.experiment.overrides import (
    decided,
    unreached,
    with_gamma,
    with_only,
    with_published_attacks,
    with_weights,
)
from mjp_privacy.federation.config import (
    Clients,
    FederationConfig,
    Probe,
    Recording,
    Server,
)
from mjp_privacy.federation.rounds import Evaluation
from mjp_privacy.report.table5 import published_row
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.uploads.record import UploadHeader
from tests.helpers.runs import FACTS, TINY, cells, one_cell, photographs, weights

CONFIGS = Path(__file__).parents[2] / "configs"


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


def lines(experiment: Experiment) -> list[tuple[Any, ...]]:
    return [(c.model, c.setting, c.gamma, c.dtype, c.attack.title) for c in expand(experiment)]


# what a config means ------------------------------------------------------------------------------

MANY = [{"name": "april", "label": f"a{number}"} for number in range(200)]
RATIOS = {"models": ["plain"], "settings": ["b"], "gammas": [n / 100 for n in range(51)]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (entry(setings=["a"]), ["grid.0.setings", "settings"]),
        (entry(settings=["z"]), ["1 mistake", "grid.0.settings.0", "'z'"]),
        (small(models={"m": {"std": [0.5, 0, 0.5]}}), ["1 mistake", "models.m.std.1: ", "got 0."]),
        (small(models={"m": {"std": 0}}), ["1 mistake", "models.m.std: ", "got 0."]),
        (small(attacks=["aprl"]), ["aprl", "april"]),
        (small(client={"bacth": 1}), ["client.bacth", "batch"]),
        (small(client={"defenses": ["int9"]}), ["client.defenses", "int9", "int8"]),
        *((small(name=name), ["name: ", name.strip()[:1]]) for name in (" ", "a\x1b[2J", "../x")),
        ({"name": "x", "models": {"ViT": {}}}, ["grid"]),
        (entry(models=["plan"]), ["grid.0", "plan", "plain"]),
        (entry(attacks=["aprl"]), ["grid.0", "aprl", "april"]),
        (entry(client={"autocast": "bf16"}, dtypes=["float64"]), ["grid.0", "autocast", "float64"]),
        (small(grid=[]), ["grid"]),
        (entry(settings=[]), ["grid.0.settings"]),
        (small(block=20, client={"batch": 3}), ["block", "batch (3)", "20"]),
        (small(attacks=[{"name": n, "label": "x"} for n in ("april", "grey")]), ["'x'"]),
        (small(attacks=[{"name": "grey", "label": "april"}, {"name": "april"}]), ["april"]),
        (small(attacks=MANY, grid=[RATIOS]), ["10200"]),
        ("ladderr", ["'ladderr'", "ladder?"]),
    ],
)
def test_a_mistake_is_named_with_what_came_and_what_is_near(content: Any, named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_experiment(content)
    assert all(name in str(caught.value) for name in named), caught.value


# every schema -------------------------------------------------------------------------------------


SCHEMAS: Mapping[type[Any], dict[str, Any]] = {
    GridEntry: {"models": ["m"], "settings": ["a"]},
    AttackConfig: {"name": "april"},
    ClassChoice: {"modulo": 5, "remainders": [0]},
    Experiment: {"name": "n"},
    FederationConfig: {"name": "n"},
    TrainingConfig: {"name": "n"},
    Evaluation: {"step": 1, "round": 1, "val_top1": None},
    UploadHeader: {"label": "a", "weights": "b", "mean": [0.5] * 3, "std": [0.5] * 3},
    **{kind: {} for kind in (ClientConfig, ModelConfig, EngineConfig)},
    **{kind: {} for kind in (Clients, Server, Probe, Recording)},
}
"""Every schema of a config, and an upload's, with good values of fields that have no default."""
NESTED: list[Any] = []
for _ in range(300):
    NESTED = [NESTED]
BAD = (object(), "x" * 5000, math.nan, math.inf, 10**400, NESTED, {1: object()})
"""What no field takes."""
NO_NUMBERS = (True, "5", [1])


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_field_has_bounds_and_refuses_bad_values_with_its_name(schema: type[Any]) -> None:
    """One field at a time; what is not there or not known is named as well."""
    whole, good = TypeAdapter(schema).json_schema(), SCHEMAS[schema]
    cases = [("surprise", good | {"surprise": 1})]
    cases += [(name, {n: v for n, v in good.items() if n != name}) for name in good]
    for name, field in whole["properties"].items():
        types = {option.get("type") for option in field.get("anyOf", [field])}
        is_number = types <= {"integer", "number", "null"}
        cases += [(name, good | {name: bad}) for bad in BAD + NO_NUMBERS * is_number]
    for name, content in cases:
        with pytest.raises(UserError) as caught:
            pytest.fail(f"{name}: {parse(schema, content, 'the config')}")
        assert name in str(caught.value)
        assert len(str(caught.value)) < 6000


# what is shipped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_parse_and_open_with_their_command(path: Path) -> None:
    experiment = load_experiment(path)
    assert experiment.name == path.stem
    head = path.read_text().split("\nname:")[0]
    assert re.search(rf"mjp attack (configs/)?{path.stem}\b", head)
    assert all(words in head for words in ("Time: ", "Expected: "))
    assert {cell.model for cell in expand(experiment)} == set(experiment.models)


def test_table5_is_the_papers_ten_rows_in_its_order() -> None:
    experiment = load_experiment("table5")
    cells = [c for c in expand(experiment) if c.attack.name == "april" and c.gamma in (0, 0.27)]
    rows = [(c.model, c.setting, c.gamma) for c in cells]
    intact = ["ViT-S", "DeiT-S", "DeiT-S (w/o PEs)", "DeiT-S+MJP"]
    assert rows == [
        *((model, "a", 0.0) for model in intact),
        *((model, "b", 0.27) for model in intact),
        ("DeiT-S+MJP (w/o)", "b", 0.27),
        ("DeiT-S+MJP", "c", 0.27),
    ]
    printed = {(experiment.models[c.model].paper, c.paper_setting or c.setting) for c in cells}
    assert len(printed) == 10
    assert all(paper and published_row(paper, setting).label for paper, setting in printed)
    without = next(c for c in cells if c.model == "DeiT-S+MJP (w/o)")
    assert (without.paper_setting, without.note is None) == ("a", False)
    alone = expand(with_published_attacks(experiment))
    assert {(c.attack.title, c.dtype) for c in alone} == {("april", "float32")}
    assert [c.gamma for c in alone if c.setting != "a"] == [0.9] * 6 + [0.27] * 6
    uploads = with_published_attacks(load_experiment("uploads"))  # which has no grid
    assert [attack.name for attack in uploads.attacks] == ["april"]


def test_only_the_models_whose_names_hold_a_text() -> None:
    experiment = load_experiment("atlas_grid")
    assert with_only(experiment, []) == experiment
    alone = with_only(experiment, ["dinov3", "CLIP"])
    assert {cell.model for cell in expand(alone)} == {"DINOv3 S/16", "CLIP B/16", "CLIP B/16 + MJP"}
    whole = {cell_key(cell, experiment) for cell in expand(experiment)}
    assert {cell_key(cell, alone) for cell in expand(alone)} < whole
    with pytest.raises(UserError, match="DINOv9"):
        with_only(experiment, ["DINOv3", "DINOv9"])


# cell_key and run_id ------------------------------------------------------------------------------


def test_cells_of_older_configs_keep_their_key_and_run_id() -> None:
    """Digests of the release before labels, clients of entries and their further fields."""
    experiment = load_experiment(CONFIGS / "demo.yaml")
    found = {}
    for c in expand(experiment):
        own = cell_key(c, experiment), run_id(c, experiment, None, True)
        found[c.model, c.setting, c.dtype, c.attack.name] = own
    expected = {
        ("ViT", "a", "float32", "april"): ("f5e654e45f94a036", "c03368e735ffe851"),
        ("ViT (w/o PEs)", "b", "float64", "april"): ("9d68dd6844e1b6b7", "fd851f239e821eed"),
        ("ViT+MJP", "c", "float32", "april"): ("7c409c17905b7b87", "bc67c9ee7c0f3e26"),
        ("ViT+MJP", "b", "float64", "april_unk_aware"): ("aa039ad8d7a94603", "2617a5b46df3d3e7"),
    }
    assert {line: found[line] for line in expected} == expected
    changed = {"mode": "train", "batch": 2, "dal": True, "dal_lambda": 0.3}
    whole = load_experiment(entry())
    same = [load_experiment(entry() | {"client": changed}), load_experiment(entry(client=changed))]
    keys = [cell_key(expand(e)[0], e) for e in (*same, whole)]
    assert keys[0] == keys[1] != keys[2]


def test_a_run_id_is_of_all_that_makes_rows_others() -> None:
    known = set[str]()
    for change in (
        {},
        {"seed": 1},
        {"dtypes": ["float64"]},
        {"client": {"dal": True}},
        {"block": 2},
        {"attacks": [{"name": "masked_span"}]},
        {"attacks": [{"name": "masked_span", "options": {"completion": "patch"}}]},
        {"grid": [{"models": ["ViT"], "settings": ["b"]}]},
        {"models": {"ViT": {**TINY, "seed": 1}}},
        {"models": {"ViT": {**TINY, "num_classes": 11}}},
        {"models": {"ViT": {**TINY, "std": 0.4}}},
    ):
        experiment = load_experiment(one_cell(**change))
        model = load_model(**experiment.models["ViT"].loading())
        [only] = expand(experiment)
        ids = {run_id(only, experiment, model, labels) for labels in (False, True)}
        assert len(ids) == 2
        assert known.isdisjoint(ids)
        known |= ids


OTHER: dict[str, Any] = {
    **{"mode": "train", "batch": 2, "partners": "fresh", "dal": True, "dal_lambda": 0.5},
    **{"plain_share": 0.5, "mask": "batch", "augment": "flip", "withhold": ("pos_embed",)},
    **{"positions": "sinusoidal", "position_noise": 0.1, "server_lr": 0.1, "lr": 0.5},
    **{"upload": "weight_difference", "weight_decay": 0.1, "defenses": ("int8",), "steps": 2},
    **{"optimizer": "adamw", "momentum": 0.9, "lora": "{rank: 4, targets: [qkv]}"},
    **{"train": "head", "autocast": "bf16"},
}
"""A value of each field of the client that is not its default; `loss` has only one value."""


def test_no_two_clients_share_an_input_an_upload_a_line_or_rows() -> None:
    """A field that is forgotten somewhere would reuse another cell's; each is a column."""
    experiment, model = load_experiment(one_cell()), load_model(**{**TINY, "dal": "linear"})
    source: Any = SimpleNamespace(data="x", place=None, labels="x")
    source.records, source.columns = lambda model: [], lambda model: {}
    [cell] = expand(experiment)
    words = {"withhold": "pos_embed", "defenses": "int8"}
    fed = Feeding(ClientConfig(), "c", 0.5, 8, 0)
    assert fed == Feeding(ClientConfig(), "c", 0.5, 8, 0)
    for field in {field.name for field in dataclasses.fields(ClientConfig)} - {"loss"}:
        client, changed = ClientConfig(), replace(ClientConfig(), **{field: OTHER[field]})
        assert fed != replace(fed, client=changed)
        cells = [replace(cell, client=one) for one in (client, changed)]
        assert len({one.federation for one in cells}) == 2
        assert len({cell_key(one, experiment) for one in cells}) == 2
        assert len({run_id(one, experiment, None, True) for one in cells}) == 2
        assert client_identity(changed) != client_identity(client)
        assert client_recipe(changed) == {field: OTHER[field]}
        if field == "dal_lambda":  # only where the loss has such a term
            changed = replace(changed, dal=True)
        facts = describe(replace(cell, client=changed), experiment, source, model)
        assert getattr(facts, field) == words.get(field, OTHER[field])


# what a command line changes ----------------------------------------------------------------------


def test_cells_that_become_equal_stand_once_where_the_first_stood() -> None:
    grid = [
        {"models": ["plain"], "settings": ["a", "b"], "gammas": [0.1, 0.2], "note": "first"},
        {"models": ["mjp", "plain"], "settings": ["b"], "gammas": [0.3], "note": "second"},
    ]
    changed = with_gamma(load_experiment(small(grid=grid)), 0.5)
    assert [(c.model, c.setting, c.gamma, c.note) for c in expand(changed)] == [
        ("plain", "a", 0.0, "first"),
        ("plain", "b", 0.5, "first"),
        ("mjp", "b", 0.5, "second"),
    ]
    for gamma in (-0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="--gamma"):
            with_gamma(changed, gamma)
    fed = [{"models": ["plain"], "settings": ["a"]}]  # where nothing is shuffled
    with pytest.raises(UserError, match="--gamma"):
        with_gamma(load_experiment(small(grid=fed)), 0.5)
    grid = [{"models": ["plain"], "settings": ["b"], "dtypes": [t]} for t in ("float32", "float64")]
    both = expand(with_gamma(load_experiment(small(grid=grid)), 0.5))
    assert [cell.dtype for cell in both] == ["float32", "float64"]


@pytest.mark.parametrize(
    ("weights", "made"),
    [
        ([], {"plain": "random", "mjp": None}),
        (["a.pth"], {"plain": "a.pth", "mjp": "a.pth"}),
        (["a.pth", "mjp=b.pth"], {"plain": "a.pth", "mjp": "b.pth"}),
        (["mpj=a.pth"], ["mpj", "mjp", "plain"]),
        (["mjp="], ["mjp", "none"]),
        ([""], ["all models", "none"]),
        (["a.pth", "b.pth"], ["all models", "two"]),
    ],
)
def test_weights_for_all_by_name_and_both(weights: list[str], made: Any) -> None:
    """A list: the words of a refusal."""
    experiment = load_experiment(small())
    if isinstance(made, dict):
        models = with_weights(experiment, weights).models
        assert {name: model.checkpoint for name, model in models.items()} == made
        return
    with pytest.raises(UserError) as caught:
        with_weights(experiment, weights)
    assert all(name in str(caught.value) for name in made), caught.value


def test_an_option_that_entries_do_not_take_is_told_and_refused_where_none_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = {"models": ["plain"], "settings": ["a"]}
    own = [plain | {"client": {"batch": 2}}, plain | {"client": {"batch": 10, "dal": True}}]
    before = load_experiment(small(grid=[plain, *own]))
    given = replace(before, client=replace(before.client, batch=4))
    (note,) = unreached(before, given)
    assert all(words in note for words in ("--client.batch", "2 of", "3 entries", "2, 10"))
    assert main(["attack", "batch_matching", "--client.batch", "8"]) == 2
    assert "--client.batch" in capsys.readouterr().err


# conditions of the grid, a model of one's own -----------------------------------------------------


MINE = "mine.safetensors"


def own(path: Path) -> Experiment:
    return with_weights(load_experiment("own"), (str(path),))


@pytest.mark.parametrize(
    ("trained", "gamma", "used"), [(None, None, 0.27), (0.5, None, 0.5), (0.5, 0.1, 0.1)]
)
def test_a_model_that_can_mask_is_shuffled_as_it_was_trained(
    tmp_path: Path, trained: float | None, gamma: float | None, used: float
) -> None:
    facts = FACTS if trained is None else FACTS | {"trained_gamma": trained}
    experiment = own(weights(tmp_path / MINE, facts, unknown_embedding=True))
    if gamma is not None:
        experiment = with_gamma(experiment, gamma)
    experiment, remarks = decided(experiment)
    under_mjp = [line for line in lines(experiment) if line[1] == "c"]
    assert {gamma for _, _, gamma, _, _ in under_mjp} == {used}
    assert {"pixel_lattice", "multi_round (6)", "plain_step"} <= {line[4] for line in under_mjp}
    assert [("own" in r, "0.5" in r) for r in remarks] == [(True, True)] * (used == trained)


def test_lines_under_mjp_are_left_out_of_models_that_cannot_mask(tmp_path: Path) -> None:
    experiment, (remark,) = decided(own(weights(tmp_path / MINE)))
    assert {setting for _, setting, *_ in lines(experiment)} == {"a"}
    assert all(name in remark for name in ("own", "E_unk", "mask_locator", "multi_round (6)"))
    entry = {"models": ["ViT"], "settings": ["b"], "only_with": "unknown_embedding"}
    with pytest.raises(UserError, match="ViT"):
        decided(load_experiment({"name": "x", "models": {"ViT": TINY}, "grid": [entry]}))


KNOWN = ["--mean", "0.5", "--std", "0.5"]
LACKING = [
    ([], ["num_heads", "mean", "std", "--num-heads", "--mean", "--std"]),
    (KNOWN, ["--num-heads"]),
    (["--mean", "0.5", "0.5"], ["--mean", "0.5 0.5"]),
    (["--mean", "0.5", "--std", "0"], ["std", "0.0"]),
    (["--model", "vit_tiny_patch16_224", *KNOWN], ["lacks", "blocks.1"]),
    ([*KNOWN, "--num-heads", "3", "--img-size", "36"], ["36/8"]),
]


def test_a_file_of_ones_own_and_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    photographs(tmp_path / "images", 1)
    places = ["--images", "images", "--device", "cpu"]
    for options, named in LACKING:
        words = ["attack", "own", "--weights", str(weights(tmp_path / MINE, {})), *options, *places]
        assert main(words) == 2
        told = capsys.readouterr().err
        assert all(name in told for name in named), told
        assert "Config" not in told  # a class of the code
        assert not (tmp_path / "results").exists()
    assert main(["attack", "own", "--weights", str(weights(tmp_path / MINE)), *places]) == 0
    (out,) = (tmp_path / "results/own").glob("mine-*")
    assert {entry["status"] for entry in cells(out)} == {"ok"}

"""What a run leaves, from which every number can be made again: rows, pictures, cells, batches;
what does not apply is a row with its reason, and is no failure."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from attacks import ATTACKS
from mjp_privacy import load_images, score
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import cell as cell_module
from mjp_privacy.experiment import diagnostics
from mjp_privacy.experiment.config import expand, load_experiment
from mjp_privacy.experiment.source import META, NO_ONE_INPUT, ModelVariants, foreseen
from mjp_privacy.interfaces import AttackerView, ClientInput, Pixels, Reconstruction
from mjp_privacy.models.jigsaw import Grid, draw_masks, shuffle_patches
from mjp_privacy.models.loading import outline_model
from tests.helpers import models
from tests.helpers.families import checkpoint
from tests.helpers.own_attacks import ROUNDS, SEEN, mjp, rounds
from tests.helpers.runs import (
    KEYS,
    PATCH,
    SIDE,
    TINY,
    attack,
    cell,
    cells,
    names,
    one_cell,
    outcome,
    photographs,
    rows,
    said,
    tensors,
    tiny,
    values,
    written,
)

BOTH = ["float32", "float64"]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    SEEN.clear()
    with patch.dict(ATTACKS, {"rounds": ROUNDS}):
        yield


# rows ---------------------------------------------------------------------------------------------


def test_stored_tensors_give_the_stored_scores(whole: Path) -> None:
    found = rows(whole).set_index(KEYS)["value"]
    for key in [entry["run_id"] for entry in cells(whole)][1::4]:
        stored = tensors(whole, key)
        assert sorted(stored) == names(6)
        for block in (list(stored)[:3], list(stored)[3:]):  # LPIPS moves with the batch
            images, targets = (
                torch.stack([stored[i][n] for i in block]) for n in ("images", "target")
            )
            for (metric, variant), again in score(images, targets).items():
                assert again.tolist() == [found[key, i, metric, variant] for i in block]


def test_settings_feed_and_score_what_they_say(whole: Path, images: Path) -> None:
    plain = {i.image_id: i.image for i in load_images(images, size=SIDE)}
    for model, setting, against in (
        ("ViT", "a", "plain"),
        ("MJP", "a", "plain"),
        ("MJP", "b", "input"),
        ("MJP", "c", "plain"),
    ):
        key, shuffled = cell(whole, model=model, setting=setting, dtype="float32"), setting != "a"
        stored = tensors(whole, key["run_id"])
        assert {*stored} == {*names(6)}
        for image_id, own in stored.items():
            fed = plain[image_id]
            assert ("mask" in own) == ("permutation" in own) == shuffled
            if shuffled:
                fed = shuffle_patches(fed[None], own["permutation"][None], PATCH)[0]
                visible = ~own["mask"]
                assert own["permutation"][visible].equal(torch.arange(16)[visible])
            assert own["plain"].equal(plain[image_id])
            assert own["input"].equal(fed)
            assert own["target"].equal(own[against])
        assert shuffled == any(not own["input"].equal(own["plain"]) for own in stored.values())


# images, cells, the folder's own config -----------------------------------------------------------


def test_a_config_attacks_the_classes_it_names(images: Path, tmp_path: Path) -> None:
    span = [{"name": "patch_gradient"}]
    chosen = one_cell(classes={"modulo": 3, "remainders": [1]}, attacks=span)
    with torch.inference_mode():  # a caller without autograd gets a run, too
        found = attack(images, tmp_path, chosen)
    assert found.images == 2
    assert not found.failures
    assert {*rows(tmp_path)["image_id"]} == {"1.png", "4.png"}
    for classes, named in (({"modulo": 10, "remainders": [7]}, "7"), ({"modulo": 1}, "modulo")):
        with pytest.raises(UserError, match=named):
            attack(images, tmp_path, one_cell(classes={"remainders": [0], **classes}))


def test_cells_stand_in_table_order_and_the_folder_says_what_it_ran(whole: Path) -> None:
    """Those of other commands stand behind them (test_resume.py)."""
    found = [(e["model"], e["setting"], e["gamma"], e["dtype"]) for e in cells(whole)]
    mjp = [("MJP", "a", 0), ("MJP", "b", 0.5), ("MJP", "c", 0.5)]
    lines = [("ViT", "a", 0), ("ViT", "b", 0.5), *mjp]
    assert found == [(*line, dtype) for line in lines for dtype in BOTH]
    assert load_experiment(whole / "experiment.yaml") == load_experiment(tiny(dtypes=BOTH))


def test_a_cell_given_twice_is_refused(images: Path, tmp_path: Path) -> None:
    entry = {"models": ["ViT"], "settings": ["a"]}
    for again in (entry, entry | {"note": "again"}, entry | {"paper_setting": "b"}):
        with pytest.raises(UserError, match="ViT"):
            attack(images, tmp_path, tiny(grid=[entry, again]))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# batches: who stands with whom; whose picture is whose stands among the golden rows ---------------


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("eight"), 8)


def batches(partners: str, uploads: int = 1, block: int = 8, **options: Any) -> dict[str, Any]:
    client = {"batch": 2, "partners": partners}
    grid = [{"models": ["ViT"], "settings": ["a"], "client": client}]
    return one_cell(block=block, grid=grid, attacks=[rounds(rounds=uploads, **options)])


def test_no_series_is_read_where_partners_change(eight: Path, tmp_path: Path) -> None:
    series = [{"name": "multi_round", "options": {"uploads": 2}}]
    attack(eight, tmp_path, batches("fresh") | {"attacks": series})
    for status, reason in outcome(tmp_path).values():
        assert status == "unsupported"
        assert "partners: fresh" in reason


def test_a_block_that_raises_is_not_done_again_in_parts(
    eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would be of clients that hold a single batch each, whose partners never change."""
    attack(eight, tmp_path / "out", batches("fresh", uploads=2, fails=4))
    for status, reason in outcome(tmp_path / "out").values():
        assert status == "failed"
        assert "4 steps are too many" in reason
    assert [len(view.updates[0].grads["pos_embed"]) for view in SEEN] == [4]
    made: list[int] = []  # nor where what raises is no attack but the client itself

    def fail(self: Any, cell: Any, names: Any, records: Any) -> Any:
        made.append(len(records))
        raise RuntimeError("the client broke")

    monkeypatch.setattr("mjp_privacy.experiment.simulated.SimulatedUploads.observe", fail)
    attack(eight, tmp_path / "fresh", batches("fresh"))
    assert made == [8]
    assert {status for status, _ in outcome(tmp_path / "fresh").values()} == {"failed"}
    attack(eight, tmp_path / "fixed", batches("fixed"))
    assert made == [8, 8, 2, 2, 2, 2]


@pytest.mark.parametrize(("block", "limit", "advice"), [(8, 2, "--limit 4"), (6, 8, "--limit 6")])
def test_a_last_block_of_one_batch_is_refused_before_any_work(
    eight: Path, tmp_path: Path, block: int, limit: int, advice: str
) -> None:
    with pytest.raises(UserError, match=rf"ViT .*{advice}\."):
        attack(eight, tmp_path / "out", batches("fresh", block=block), limit=limit)
    assert not SEEN
    attack(eight, tmp_path / "out", batches("fresh", block=block), limit=int(advice.split()[1]))
    attack(eight, tmp_path / "fixed", batches("fixed", block=block), limit=limit)
    with pytest.raises(UserError, match=r"ViT .*--limit 2\."):  # half a step
        attack(eight, tmp_path / "odd", batches("fixed", block=block), limit=3)


# what does not apply ------------------------------------------------------------------------------


def test_inapplicable_images_are_no_failures_and_single_steps_have_the_blocks_rows(
    three: Path, tmp_path: Path
) -> None:
    """An attack that breaks on the block gets its steps one by one, with masks, labels, rounds."""
    for breaks in (False, True):
        out, alone = tmp_path / f"{breaks}", rounds("other", rounds=2, breaks=breaks)
        none = rounds(rounds=2, inapplicable=[0 if breaks else 1], breaks=breaks)
        summary = attack(three, out, mjp("c", none, alone, {"name": "mask_locator"}))
        assert (summary.exit_code, summary.failures) == (0, ())
        told = outcome(out, attack="rounds")
        refused = [reason for status, reason in told.values() if status != "ok"]
        assert refused == ["too dark"] * (3 if breaks else 1)
        assert {status for status, _ in told.values()} <= {"ok", "unsupported"}
    whole, steps = (values(tmp_path / f"{breaks}", attack="other") for breaks in (False, True))
    assert "mask_recall" in whole.index.get_level_values("metric")
    assert whole.equals(steps)
    labels = [view.labels.tolist() for view in SEEN]  # type: ignore[union-attr]
    assert labels[-3:] == [[label] for label in labels[0]]
    assert all([u.round for u in view.updates] == [0, 1] for view in SEEN)
    attack(three, out, mjp("c", none, alone, {"name": "mask_locator"}))
    assert "all 9 units" in said(out)  # they were finished, what does not apply as well
    found = values(out, attack="mask_locator")  # it names masks only, and is scored by them
    assert {status for status, _ in outcome(out, attack="mask_locator").values()} == {"unscored"}
    for name in ("mask_precision", "mask_recall"):
        assert (found.xs(name, level="metric") == 1).all()


SPAN, LOCAL = {"name": "masked_span"}, {"name": "patch_gradient"}
APRIL, GREY = {"name": "april"}, {"name": "grey"}


def test_pictures_too_small_for_lpips_have_all_other_scores(three: Path, tmp_path: Path) -> None:
    small = {"small": {**TINY, "img_size": 28, "patch_size": 7}}
    grid = [{"models": ["small"], "settings": ["a"]}]
    attack(three, tmp_path, one_cell(models=small, grid=grid, attacks=[LOCAL, GREY]), limit=1)
    scored = {*values(tmp_path, attack="patch_gradient").dropna().index.get_level_values("metric")}
    assert {"psnr", "ssim", "mse", "fft2d"} <= scored
    assert "lpips" not in scored


def test_an_attack_that_ran_alone_is_compared_once_another_competes(
    three: Path, tmp_path: Path
) -> None:
    attack(three, tmp_path / "grown", one_cell(attacks=[SPAN, GREY]), limit=2)
    for out in ("grown", "whole"):
        attack(three, tmp_path / out, one_cell(attacks=[SPAN, LOCAL, GREY]), limit=2)
    grown, whole = (values(tmp_path / out, attack="masked_span") for out in ("grown", "whole"))
    named = grown.index.get_level_values("metric")
    assert (named == "gradient_residual").sum() == 2
    assert grown.drop(grown.index[named == "seconds"]).equals(
        whole.drop(whole.index[whole.index.get_level_values("metric") == "seconds"])
    )
    attack(three, tmp_path / "grown", one_cell(attacks=[SPAN, LOCAL, GREY]), limit=2)
    assert "nothing to do" in said(tmp_path / "grown")


@pytest.mark.parametrize(
    ("attacks", "asked", "having"),
    [
        ([LOCAL, APRIL, GREY], [], set()),  # APRIL's client has another block 0
        ([LOCAL, SPAN, APRIL, GREY], [], {"patch_gradient", "masked_span"}),
        ([APRIL, GREY], ["residual"], {"april"}),
    ],
)
def test_the_residual_is_computed_where_it_decides_or_is_asked_for(
    three: Path, tmp_path: Path, attacks: list[Any], asked: list[str], having: set[str]
) -> None:
    config = one_cell(attacks=attacks, diagnostics=asked, dtypes=["float64"])
    attack(three, tmp_path, config, limit=1)
    found = rows(tmp_path)
    assert {*found[found["metric"] == "gradient_residual"]["attack"]} == having


# patches put back; masks and regions are golden rows, residuals are asked in tests/uploads --------


@pytest.mark.parametrize("against", ["input", "plain"])
def test_an_attack_that_knows_the_order_is_all_right(against: Any) -> None:
    plain, ids, model = models.some_images(3), ["a", "b", "c"], models.tiny(unknown_embedding=True)
    mask, order = draw_masks(ids, grid=Grid(4, 4), gamma=0.5, round=0, seed=1)
    inputs = ClientInput(
        shuffle_patches(plain, order, PATCH), models.some_labels(3), ids, mask, order
    )
    view = AttackerView(model, [], Pixels(32, models.MEAN, models.STD), inputs.labels, against)
    images = inputs.images if against == "input" else plain
    known = Reconstruction(images, permutation=order)
    found = diagnostics.jigsaw(known, images, inputs, plain, view)
    assert found["jigsaw_direct"].tolist() == found["jigsaw_neighbour"].tolist() == [1] * 3
    left = Reconstruction(inputs.images, permutation=torch.arange(16).repeat(3, 1))
    found = diagnostics.jigsaw(left, inputs.images, inputs, plain, view)
    assert (found["jigsaw_direct"] < 1).all()
    assert (found["oracle_permutation_psnr"] > 200).all()
    assert diagnostics.jigsaw(Reconstruction(images), images, inputs, plain, view) == {}


# foreseen -----------------------------------------------------------------------------------------


CLIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 2},
    "withholds": {"withhold": ["pos_embed", "blocks.0.attn.qkv.weight"]},
    "sine": {"positions": "sinusoidal"},
    "adamw": {"upload": "weight_difference", "optimizer": "adamw", "steps": 2},
}
FORESEEN = [
    *({"name": name} for name in ("april", "april_unk_aware", "patch_gradient", "grey")),
    {"name": "april_prior", "options": {"prior": "stationary"}},
    {"name": "mask_locator"},
    {"name": "masked_span", "options": {"completion": "none"}},
    {"name": "multi_round", "options": {"uploads": 2, "completion": "none"}},
    {"name": "token_span", "options": {"completion": "none"}},
]


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_foreseen_is_what_happens(
    client: str, tmp_path: Path, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a narrow, a plain, and an MJP model in every setting; nobody asks for the scores."""
    monkeypatch.setattr(cell_module, "score", lambda *_: {})
    unread = SimpleNamespace(at=lambda places: None)
    monkeypatch.setattr(cell_module, "prepare", lambda *_, **__: unread)
    models = {
        "narrow": TINY | {"embed_dim": 12},
        "ViT": TINY,
        "MJP": {**TINY, "unknown_embedding": True, "dal": "linear"},
        "no table": TINY | {"position_embedding": "strict"},
    }
    settings = ["b", "c"]
    if client != "plain":  # the sine client cannot do without a learned table to replace
        models, settings = {"MJP": models["MJP"]}, ["c"]
    grid = [
        {"models": [*models], "settings": ["a"]},
        {"models": ["MJP"], "settings": settings, "gammas": [0.5]},
    ]
    config = one_cell(models=models, grid=grid, attacks=FORESEEN, block=2, client=CLIENTS[client])
    summary = attack(three, tmp_path, config, limit=2)
    assert not summary.failures
    experiment, before = load_experiment(config), Counter[str]()
    for line in expand(experiment):
        own = experiment.models[line.model]
        outline = outline_model(own.model, whole=True, **own.loading())
        if (refusal := foreseen(ModelVariants(outline, META), line)) is not None:
            before[refusal.text] += 1
    refused: dict[str, set[str]] = {}
    for entry in cells(tmp_path):
        for status, reason in outcome(tmp_path, run_id=entry["run_id"]).values():
            if status == "unsupported":
                refused.setdefault(reason, set()).add(entry["run_id"])
    assert before == {reason: len(of) for reason, of in refused.items()}
    assert before
    assert (NO_ONE_INPUT.text in before) == (client == "plain")  # of two uploads in setting b
    assert all(any(reason in line for line in summary.inapplicable) for reason in before)


# networks of another family: their attacks stand among the golden rows ----------------------------


def test_clients_of_plain_vits_are_refused(three: Path, tmp_path: Path) -> None:
    models = {"resnet": {"checkpoint": str(checkpoint(tmp_path / "model", "resnet"))}}
    clients: dict[str, dict[str, Any]] = {
        "positions: own": {"positions": "sinusoidal"},
        "adapters": {"lora": "{rank: 2, targets: [qkv]}"},
        "client.mode: eval": {"mode": "train"},
    }
    entry = {"models": ["resnet"], "settings": ["a"]}
    grid = [entry | {"client": client} for client in clients.values()]
    matching = [{"name": "inverting_gradients", "options": {"steps": 3}}]
    config = one_cell(models=models, attacks=matching, grid=grid)
    attack(three, tmp_path / "run", config, limit=1)
    for named, entry in zip(clients, cells(tmp_path / "run"), strict=True):
        ((status, reason),) = outcome(tmp_path / "run", run_id=entry["run_id"]).values()
        assert status == "unsupported"
        assert named in reason


# controls: what each gives stands among the golden rows -------------------------------------------


def test_one_image_alone_has_no_other(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no control needs a client's gradient."""
    monkeypatch.setattr(FedSGDClient, "gradients", lambda *_, **__: pytest.fail("none is needed"))
    config = tiny(attacks=[{"name": name} for name in ("grey", "other_image", "oracle_inverse")])
    assert attack(images, tmp_path, config, limit=1).exit_code == 0
    alone = rows(tmp_path)
    without = alone["attack"] == "other_image"
    assert set(alone.loc[without, "status"]) == {"unsupported"}
    assert alone.loc[without, "reason"].notna().all()
    assert set(alone.loc[~without, "status"]) == {"ok"}
    files = written(tmp_path)
    attack(images, tmp_path, config, limit=1)
    assert written(tmp_path) == files

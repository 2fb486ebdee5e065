"""Gradients in every form that users have them, of plain PyTorch loops over models of others, and
objects that cannot be attacked or saved: each is a UserError that names the argument."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients, save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown
from mjp_privacy.data import load_images
from mjp_privacy.models import LoadedModel
from mjp_privacy.uploads.reading import read_gradients, separate_uploads
from tests.helpers.libraries import CLASSES, DIM, SIDE, SOURCES, randomised
from tests.helpers.models import some_images, some_labels, tiny

NAN, HUGE = float("nan"), 10**400
LONG, CONTROLS = "x" * 5000, "a\x1b[2Jb\n"

# every form ---------------------------------------------------------------------------------------


@pytest.fixture
def small() -> LoadedModel:
    """A model with the gradient of one image in its .grad."""
    model = tiny(torch.float32)
    logits = model(model.normalize(some_images(1).float()))
    nn.functional.cross_entropy(logits, some_labels(1)).backward()
    return model


def by_name(model: LoadedModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_every_form_reads_the_same(small: LoadedModel) -> None:
    sent = by_name(small)
    trained = [g for name, g in sent.items() if name != "cls_token"]
    forms: dict[str, Any] = {
        "wrappers": {f"_orig_mod.module.{name}": g for name, g in sent.items()},
        "parameter order": [p.grad for p in small.parameters()],
        "NumPy": {name: g.numpy() for name, g in sent.items()},
        "big-endian NumPy": {name: g.numpy().astype(">f4") for name, g in sent.items()},
        "model": small,
        ".grad": None,
        "with None": {**sent, "cls_token": None},
        "without a frozen parameter": trained,
    }
    small.cls_token.requires_grad_(False)
    for form, held in forms.items():
        (one,) = separate_uploads(held)
        read = read_gradients(one, small, small)
        assert all(torch.equal(read[name], sent[name].unsqueeze(0)) for name in read), form
        assert set(sent) - set(read) <= {"cls_token"}, form
    wrapped = nn.DataParallel(small)
    assert read_gradients(None, wrapped, small).keys() == sent.keys()
    several = [sent], [sent, sent], [trained], [trained] * 3, iter(trained)
    assert [len(separate_uploads(held)) for held in several] == [1, 2, 1, 3, 1]


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"head.weight": torch.ones(3, 24)}, r"head\.weight .*\(5, 24\).*\(3, 24\)"),
        ({"hed.bias": torch.ones(5)}, r"hed\.bias.*head\.bias"),
        ({"cls_token": None, "boss": torch.ones(1, 1, 24)}, r"1 of .*boss.*cls_token"),
        ({"head.weight": torch.full((5, 24), torch.nan)}, r"head\.weight"),
        ({"head.bias": torch.ones(2, 5)}, r"head\.bias"),
        # what the classifier of zeros of torchvision's fresh ViT passes back
        ({"patch_embed.proj.weight": torch.zeros(24, 3, 8, 8)}, "classifier"),
        (None, "weights"),
    ],
)
def test_a_wrong_entry_is_named(small: LoadedModel, entries: Any, named: str) -> None:
    weights = dict(small.named_parameters())
    with pytest.raises(UserError, match=named):
        read_gradients({**by_name(small), **entries} if entries else weights, small, small)


# bad objects --------------------------------------------------------------------------------------


class Foreign:
    """An object of a class that nothing here knows."""


BAD_TENSORS: list[Any] = [
    *(None, 5, "x", np.array([None] * 10), np.array(["a"] * 10), Foreign()),
    *(torch.ones(10, dtype=dtype) for dtype in (torch.int64, torch.cfloat, torch.float8_e4m3fn)),
    *(torch.ones(shape) for shape in (0, 9, (10, 10, 1), (2, 9))),
    *(torch.full((10,), NAN), torch.zeros(10), torch.ones(10, device="meta")),
    torch.quantize_per_tensor(torch.ones(10), 0.1, 0, torch.qint8),
]
BAD: dict[str, list[Any]] = {
    "model": [None, 5, "vit_tiny_patch16_224", [], [5], nn.Module(), nn.Linear(2, 2), Foreign],
    "gradients": [
        *(5, "gradients.pt", [], [[]], {}, Foreign(), torch.ones(3)),
        *({"head.bias": value} for value in BAD_TENSORS),
        *({name: torch.ones(1)} for name in (LONG, CONTROLS, 5)),
        *([torch.ones(1), {}], [torch.ones(1)] * 7),
    ],
    "labels": [
        *("3", ["a"], {}, Foreign(), [], -1, 10, HUGE, [2**70], 1.5, True, LONG),
        *(torch.ones(1, dtype=torch.cfloat), torch.ones(0, dtype=torch.long)),
    ],
    "mean": ["0.5", NAN, [0.5, 0.5], [[0.5] * 3], 300, (HUGE,) * 3, Foreign(), True],
    "std": [0, -0.5, NAN, [0.5, 0, 0.5], 300, "x"],
    "images": [
        *(5, "cat.png", [], Foreign(), np.array(["a"])),
        *(torch.rand(1, 1, 32, 32), torch.rand(3, 9, 9), torch.rand(0, 3, 32, 32), torch.ones(())),
        *(torch.full((1, 3, 32, 32), NAN), torch.randn(1, 3, 32, 32)),
        torch.zeros(1, 3, 32, 32, dtype=torch.bool),
        torch.rand(1, 3, 32, 32, device="meta"),
    ],
    "kind": [None, 5, "Gradient", CONTROLS, np.ones(3)],
    # fields of a client, of which tests/experiment/test_config.py has every wrong value
    **{name: ["0.1", 0, 10**9, HUGE, torch.ones(2)] for name in ("batch", "steps")},
    **{name: ["0.1", -1, HUGE, torch.ones(2)] for name in ("lr", "momentum", "noise")},
    "optimizer": [None, "lion", LONG, []],
    "defenses": ["int8", ["int9"], ["int8", "float16"], [5], 5],
}
ATTACKING: dict[str, list[Any]] = {
    **BAD,
    "attacks": [5, None, "aprl", LONG, CONTROLS, [], [5], {}, {"april": None}, {"april": {"x": 1}}],
}
SAVING: dict[str, list[Any]] = {
    **{name: BAD[name][:2] for name in ("model", "gradients", "images", "batch", "lr")},
    "folder": [None, " ", "a\0b", []],
    "name": [None, "", "../x", ".hidden", "x" * 300, CONTROLS],
    "label": [5, " ", LONG, CONTROLS],
    "round": [None, "3", -1, 10**30, True],
    "series": [5, "", CONTROLS],
    "gamma": [None, -0.1, 1.5, NAN, True],
}


def refused(call: Any, name: str, values: list[Any], given: dict[str, Any]) -> Iterator[str]:
    """Every one of these values that is not refused by a line with the argument's name."""
    training = {"kind": "weight_difference", "lr": 0.1} if name == "lr" else {}
    for value in values:
        said = "taken"
        try:
            call(**{**given, **training, name: value})
        except UserError as error:
            text = str(error)
            named = name == "model" or name.removesuffix("s") in text.lower()
            clear = named and len(text) < 1200 and text.replace("\n", "").isprintable()
            said = "" if clear else ascii(text[:300])
        if said:
            yield f"{name}={shown(repr(value), 100)}: {said}"


@pytest.mark.parametrize("name", ATTACKING)
def test_bad_objects_are_refused_by_their_names(
    name: str, model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    given = {"attacks": "mask_locator", "model": model, "gradients": gradients}
    assert not list(refused(attack_gradients, name, ATTACKING[name], given))


@pytest.mark.parametrize("name", SAVING)
def test_nothing_of_a_bad_object_is_saved(
    name: str, tmp_path: Path, model: LoadedModel, gradients: dict[str, Tensor]
) -> None:
    given = {"folder": tmp_path / "uploads", "model": model, "gradients": gradients}
    assert not list(refused(save_upload, name, SAVING[name], given))
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kind": "weight_difference"}, "lr"),
        ({"lr": 0.1}, "lr=0.1"),
        ({"labels": [1, 2], "batch": 1}, r"labels: .*\[1, 2"),
        ({"defenses": ["int8", "float16"]}, "rounding="),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(
    model: LoadedModel, gradients: dict[str, Tensor], arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        attack_gradients(model, gradients, **arguments)


# other libraries' models --------------------------------------------------------------------------

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


@pytest.mark.parametrize("library", SOURCES)
def test_one_step_gives_its_picture(library: str, tmp_path: Path) -> None:
    """Of cross entropy on class 1, or a similarity where the model has no classes; one without a
    classifier is attacked, and not saved."""
    torch.manual_seed(0)
    model = randomised(SOURCES[library].build()).train()
    image = next(iter(load_images("embedded", size=SIDE, limit=1)))[0].unsqueeze(0)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    made = SOURCES[library].run(model, (image - mean) / std)
    classifies = made.shape[-1] == CLASSES
    if classifies:
        loss = nn.functional.cross_entropy(made, torch.tensor([1]))
    else:
        loss = nn.functional.cosine_similarity(made[0], torch.randn(made.shape[-1]), dim=0)
    loss.backward()
    with pytest.raises(UserError, match="mean"):  # which is never guessed
        attack_gradients(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    leak = attack_gradients(model, mean=MEAN, std=STD, images=image, attacks="patch_gradient")
    assert leak.best.exact == 1
    assert leak.best.is_certain
    assert leak.best.misfit < 1e-3
    if classifies:
        assert leak.best.residual < 1e-3
        assert leak.labels.tolist() == [1]
    elif made.shape[-1] == DIM:  # features
        with pytest.raises(UserError, match="classifier"):
            save_upload(tmp_path, model, mean=0.5, std=0.5)
    assert model.training
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())

"""Bad inputs that are files of tensors: headers that lie, shapes and types that fit nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.inputs.case import Case
from tests.inputs.cases_fields import FEDERATE, UPLOAD
from tests.inputs.cases_files import ATTACK_UPLOADS, CHECK, PRIOR, TRAIN_AGAIN, file_case, own
from tests.inputs.tensors import (
    HEADER_CHANGES,
    tensor_changes,
    with_header,
    with_state,
    with_tensors,
)


def all_cases() -> Iterator[Case]:
    """Every case of this file."""
    model = ("patch_embed.proj.weight", "pos_embed", "cls_token", "blocks.0.attn.qkv.weight")
    model += ("head.weight", "blocks.0.mlp.fc1.weight", "norm.weight")
    upload = ("patch_embed.proj.weight", "pos_embed", "head.weight", "patch_embed.proj.bias")
    targets: tuple[tuple[str, str, tuple[tuple[str, ...], ...], tuple[str, ...]], ...] = (
        (
            "checkpoints",
            "model.safetensors",
            (
                ("check", "--model", "model.safetensors"),
                own("model.safetensors"),
                ("evaluate", "--checkpoint", "model.safetensors", "--data", "classes"),
            ),
            model,
        ),
        ("checkpoints", "mjp.safetensors", (own("mjp.safetensors"),), ("unk_embed", "pos_embed")),
        (
            "checkpoints",
            "official_mjp.safetensors",
            (own("official_mjp.safetensors"),),
            ("pos_embed.weight",),
        ),
        (
            "checkpoints",
            "prior.safetensors",
            (PRIOR,),
            ("mean", "frequencies", "spectrum", "patch_mean", "patch_covariance"),
        ),
        ("uploads", f"uploads/{UPLOAD}.safetensors", (CHECK, ATTACK_UPLOADS), upload),
        (
            "uploads",
            f"uploads/truth/{UPLOAD}.safetensors",
            (CHECK, ATTACK_UPLOADS),
            ("images", "mask", "permutation"),
        ),
        ("uploads", "uploads/weights/*.safetensors", (CHECK, ATTACK_UPLOADS), model[:3]),
    )
    for room, file, argvs, names in targets:
        for argv in argvs:
            for title, header in HEADER_CHANGES.items():
                yield file_case(room, file, argv, title, with_header(header))
            for title, change in tensor_changes(*names).items():
                yield file_case(room, file, argv, title, with_tensors(change))
    for argv in (("check", "--model", "model.pth"), own("model.pth")):
        for title, change in {**tensor_changes(*model), **STATES}.items():
            yield file_case("checkpoints", "model.pth", argv, title, with_state(change))
    for file, argv in (
        ("trained/checkpoint.pt", TRAIN_AGAIN),
        ("federation/checkpoint.pt", FEDERATE),
    ):
        for title, change in {**STATES, **CHECKPOINTS}.items():
            room = "training" if "trained" in file else "federation"
            yield file_case(room, file, argv, title, with_state(change))


STATES: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "saved: a list": lambda state: [1, 2],
    "saved: a number": lambda state: 5,
    "saved: a tensor": lambda state: next((v for v in state.values() if hasattr(v, "shape")), 5),
    "saved: names that are numbers": lambda state: dict(enumerate(state.values())),
    "saved: nested ten times": lambda state: _nested(state),
    "saved: model that is a number": lambda state: {"model": 5},
    "saved: empty": lambda state: {},
    "saved: holds itself": lambda state: state.update(model=state),
}
CHECKPOINTS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "every value 5": lambda state: dict.fromkeys(state, 5),
    "every value None": lambda state: dict.fromkeys(state),
    "every value a text": lambda state: dict.fromkeys(state, "x"),
    "every value empty": lambda state: {key: {} for key in state},
    "no first entry": lambda state: dict(list(state.items())[1:]),
    "no last entry": lambda state: dict(list(state.items())[:-1]),
    "numbers -1": lambda state: {k: -1 if isinstance(v, int) else v for k, v in state.items()},
    "numbers 10^30": lambda s: {k: 10**30 if isinstance(v, int) else v for k, v in s.items()},
}


def _nested(state: dict[str, Any]) -> dict[str, Any]:
    for _ in range(10):
        state = {"state_dict": state}
    return state

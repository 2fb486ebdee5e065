"""Uploads of networks whose blocks are one's own, in ways that most are not."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from mjp_privacy import attack_gradients
from mjp_privacy.core.errors import UserError
from mjp_privacy.models.live.modules import load_module
from tests.uploads.test_own_networks import (
    DIM,
    PATCH,
    Beside,
    Block,
    ByHand,
    Gated,
    Own,
    RootMeanSquare,
    leak_of,
    photographs,
    with_blocks,
)

GIVEN: dict[str, Any] = {"attacks": "token_peeling", "img_size": 32}


class Keeps(Gated):
    """Keeps what it computes, by itself and in a list."""

    def forward(self, u: Tensor) -> Tensor:
        self.last = super().forward(u)
        self.__dict__.setdefault("all", []).append(self.last)
        return self.last


def test_parts_may_keep_what_they_computed() -> None:
    torch.manual_seed(4)
    network = ByHand("three", "list", gate="module")
    for block in network.blocks:
        block.mlp = Keeps(True)
    found = leak_of(network, photographs(2), batch=2, **GIVEN)
    assert (found.best.exact, found.best.verified) == (2, 2)


def test_blocks_may_be_computed_again_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    sizes: Any = {"img_size": 56, "embed_dim": 96, "depth": 2, "num_heads": 4, "num_classes": 10}
    network = timm.create_model("vit_small_patch14_dinov2", **sizes)
    for name, scale in network.named_parameters():
        if "gamma" in name:
            nn.init.constant_(scale, 0.1)
    network.set_grad_checkpointing(True)
    found = leak_of(network, photographs(1, 56), attacks=["patch_gradient", "token_peeling"])
    assert found["patch_gradient"].exact == 1
    assert found["patch_gradient"].residual < 1e-6
    assert network.grad_checkpointing


def test_blocks_that_share_their_weights_are_named_so() -> None:
    torch.manual_seed(4)
    network = ByHand("three", "list")
    network.blocks[1] = network.blocks[0]
    why = leak_of(network, photographs(1), **GIVEN).refused["token_peeling"]
    assert "more than once" in why
    network = ByHand("three", "list")
    for part in ("out", "up", "down"):
        getattr(network.blocks[1], part).weight = getattr(network.blocks[0], part).weight
    assert "more than once" in leak_of(network, photographs(1), **GIVEN).refused["token_peeling"]


class Neck(ByHand):
    """With patches that are embedded otherwise than block 0 is given them: `wide`, and then
    narrowed by a linear layer, with a table before it, or small, and then joined."""

    def __init__(self, kind: str) -> None:
        super().__init__("three", "list")
        self.kind = kind
        if kind == "joined":
            first, second = nn.Conv2d(3, DIM, PATCH // 2, PATCH // 2), nn.Conv2d(DIM, DIM, 2, 2)
            self.embed = nn.Sequential(first, nn.GELU(), second)  # type: ignore[assignment]
        else:
            self.embed, self.neck = nn.Conv2d(3, 2 * DIM, PATCH, PATCH), nn.Linear(2 * DIM, DIM)
        if kind == "wide, with a table":
            self.location = nn.Parameter(0.1 * torch.randn(1, 16, 2 * DIM))

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x).flatten(2).mT
        if self.kind == "wide, with a table":
            z = z + self.location
        z = z if self.kind == "joined" else self.neck(z)
        z = torch.cat((self.cls.expand(len(z), -1, -1), z), 1) + self.pos_embed
        return self.head(self.encoder(z.transpose(0, 1)).mean(0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["wide", "wide, with a table", "joined"])
def test_tokens_that_are_no_embedded_patches_are_named_so(kind: str) -> None:
    torch.manual_seed(4)
    read = ["patch_gradient", "token_peeling", "layer_span", "token_span", "batch_lattice"]
    found = leak_of(Neck(kind), photographs(1), img_size=32, attacks=read)
    assert "what stands between" in found.refused["token_peeling"]
    assert not any("Error" in why for why in found.refused.values())
    if kind == "wide, with a table":
        assert (found.best.attack, found.best.exact) == ("patch_gradient", 1)


class Rows(ByHand):
    """With a learned table of rows alone."""

    def __init__(self) -> None:
        super().__init__("three", "list")
        self.row_pos = nn.Parameter(0.1 * torch.randn(4, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x).flatten(2).mT + self.row_pos.expand(4, 4, DIM).flatten(0, 1)
        z = z + self.pos_embed[:, 1:]
        return self.head(self.encoder(z.transpose(0, 1)).mean(0))  # type: ignore[no-any-return]


def test_a_table_of_rows_alone_is_none_of_patches() -> None:
    torch.manual_seed(4)
    found = leak_of(
        Rows(), photographs(1), attacks=["patch_gradient", "token_peeling"], img_size=32
    )
    assert "no table of positions" in found.refused["patch_gradient"]
    assert (found.best.attack, found.best.exact) == ("token_peeling", 1)


class Pads(Own):
    """That pads pictures before it embeds them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (4, 4, 4, 4)))


class Says(Own):
    """That returns no tensor."""

    def forward(self, x: Tensor) -> Any:
        return str(super().forward(x).argmax())


def test_a_network_without_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="parameters"):
        load_module(nn.Identity(), mean=0.5, std=0.5)


@pytest.mark.parametrize(("kind", "named"), [(Pads, "pads"), (Says, "tensor")])
def test_what_stands_around_the_network_is_named(kind: Any, named: str) -> None:
    network = kind(40, norm_first=True, batch_first=True)
    sent = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    with pytest.raises(UserError, match=named) as caught:
        attack_gradients(network, sent, mean=0.5, std=0.5, img_size=32 if kind is Pads else None)
    assert "StopIteration" not in str(caught.value)


class Scaled(Block):
    """With one vector or number for each of these branches, under names of its own; all start
    alike."""

    def __init__(self, branches: str, numbers: int = DIM, norm: Any = nn.LayerNorm) -> None:
        super().__init__("three", norm)
        self.g, self.weights_of = (nn.Parameter(torch.full((1, numbers), 0.3)) for _ in range(2))
        if "a" not in branches:
            self.g = None  # type: ignore[assignment]
        if "b" not in branches:
            self.weights_of = None  # type: ignore[assignment]

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y = self.ln1(z)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in self.layers)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        z = z + (1 if self.g is None else self.g) * self.out(mixed)
        branch = self.branch(self.ln2(z))
        return z + (1 if self.weights_of is None else self.weights_of) * branch, y


class ScaledBeside(Beside):
    """Both branches beside each other, with a vector each."""

    def __init__(self) -> None:
        super().__init__(2)
        self.g, self.weights_of = (nn.Parameter(torch.full((DIM,), 0.3)) for _ in range(2))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y = self.ln1(z)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in self.layers)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return z + self.g * self.out(mixed) + self.weights_of * self.branch(self.ln2(z)), y


SCALED = {
    "of attention": lambda: Scaled("a"),
    "of attention, another norm": lambda: Scaled("a", norm=RootMeanSquare),
    "of the two layers": lambda: Scaled("b"),
    "of both": lambda: Scaled("ab"),
    "numbers": lambda: Scaled("ab", 1),
    "beside each other": ScaledBeside,
}


@pytest.mark.parametrize("kind", SCALED)
def test_layer_scales_are_found_whatever_they_are_called(kind: str) -> None:
    torch.manual_seed(4)
    network = with_blocks(SCALED[kind])
    for name, parameter in network.blocks.named_parameters():
        if name.endswith(("g", "weights_of")) and parameter.numel() == DIM:
            parameter.data.uniform_(0.3, 1)
    found = leak_of(network, photographs(1), **GIVEN)
    assert (found.best.exact, found.best.verified) == (1, 1)

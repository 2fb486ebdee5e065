"""Uploads of networks of one's own, whose tables of positions are known by what they do."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.live.modules import load_module
from tests.uploads.test_own_networks import DIM, PATCH, Own, leak_of, photographs

EQUATION = ("patch_gradient", 1, 1)
READ = ["patch_gradient", "token_peeling", "layer_span", "token_span"]


class Placed(Own):
    """With a table, in place of `pos_embed`, that has another name and rows for every token; the
    class token stands behind the patches where it is `last`. `embed` may be a linear layer."""

    def __init__(self, name: str, *, last: bool = False, linear: bool = False) -> None:
        super().__init__(norm_first=True, batch_first=True)
        del self.pos_embed
        rows = 0.1 * torch.randn((32 // PATCH) ** 2 + 1, DIM)
        self.name, self.last, self.linear = name, last, linear
        embedding = nn.Embedding.from_pretrained(rows, freeze=False)
        setattr(self, name, embedding if name == "table" else nn.Parameter(rows[None]))
        self.registers = nn.Parameter(torch.randn(1, 4, DIM))
        self.mask_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.queries = nn.Parameter(torch.randn(1, len(rows), DIM))
        if linear:
            self.embed = nn.Linear(3 * PATCH**2, DIM)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if self.linear:
            z = self.embed(nn.functional.unfold(x, PATCH, stride=PATCH).mT)
        else:
            z = self.embed(x).flatten(2).mT
        cls = self.cls.expand(len(z), -1, -1)
        table: Any = getattr(self, self.name)
        table = table(torch.arange(z.shape[1] + 1)) if self.name == "table" else table
        z = torch.cat((z, cls) if self.last else (cls, z), 1) + table
        z = torch.cat((z, self.registers.expand(len(z), -1, -1)), 1)
        return self.head(self.encoder(z).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["place_embed", "grid_embed", "location", "table"])
def test_a_table_is_known_by_what_it_does(name: str) -> None:
    torch.manual_seed(0)
    found = leak_of(Placed(name), photographs(1), attacks="patch_gradient")
    assert (found.best.attack, found.best.exact, found.best.verified) == EQUATION
    found = leak_of(Placed(name, linear=True), photographs(1), attacks="patch_gradient")
    assert (found.best.attack, found.best.exact, found.best.verified) == EQUATION


@pytest.mark.parametrize("name", ["pos_embed", "location"])
def test_the_patches_rows_are_found_where_the_class_token_is_last(name: str) -> None:
    torch.manual_seed(0)
    network = Placed(name, last=True)
    found = leak_of(network, photographs(1), attacks=["patch_gradient", "april"])
    assert (found.best.attack, found.best.exact, found.best.verified) == EQUATION
    batch = leak_of(network, photographs(2), attacks="token_peeling", batch=2)
    assert batch.best.exact == 2
    one = load_module(network, mean=0.5, std=0.5)
    assert (one.before, one.prefix, one.pos_embed is not None) == (0, 0, True)


class Scaled(nn.Module):
    """An embedding with a constant factor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, DIM, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def test_a_table_beside_a_scaled_embedding_has_the_users_name() -> None:
    network = Placed("my_pos")
    network.embed = Scaled()  # type: ignore[assignment]
    with pytest.raises(UserError) as caught:
        load_module(network, mean=0.5, std=0.5)
    assert "my_pos" in str(caught.value)
    assert "pos_embed" not in str(caught.value)


class Stretched(Placed):
    """Which stretches the patches' rows of its table to the picture; the last is the class's."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        rows, side = self.location[:, :-1].mT, int((self.location.shape[1] - 1) ** 0.5)
        if z.shape[-1] != side:
            places = rows.unflatten(2, (side, side))
            rows = nn.functional.interpolate(places, z.shape[-2:], mode="bicubic").flatten(2)
        cls = (self.cls + self.location[:, -1:]).expand(len(z), -1, -1)
        return self.head(self.encoder(torch.cat((z.flatten(2).mT + rows.mT, cls), 1)).mean(1))  # type: ignore[no-any-return]


def test_a_table_with_the_class_token_last_may_be_stretched() -> None:
    torch.manual_seed(0)
    network, images = Stretched("location", last=True), photographs(1, 24)
    found = leak_of(network, images, img_size=24, attacks="patch_gradient")
    assert (found.best.attack, found.best.exact, found.best.verified) == EQUATION


class MapOfPlaces(Own):
    """With a map of places under another name."""

    def __init__(self) -> None:
        super().__init__(norm_first=True, batch_first=True)
        del self.pos_embed
        self.places = nn.Parameter(0.1 * torch.randn(1, DIM, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = (self.embed(x) + self.places).flatten(2).mT
        return self.head(self.encoder(z).mean(1))  # type: ignore[no-any-return]


def test_a_map_of_places_may_have_any_name() -> None:
    torch.manual_seed(0)
    found = leak_of(MapOfPlaces(), photographs(1), attacks="patch_gradient")
    assert (found.best.attack, found.best.exact, found.best.verified) == EQUATION


class WithoutTable(Own):
    """With a fixed table, and as many learned rows that each token is compared with: no table."""

    def __init__(self) -> None:
        super().__init__(sine=True, norm_first=True, batch_first=True)
        fixed = self.pos_embed.detach()
        del self.pos_embed
        self.register_buffer("pos_embed", fixed)
        self.queries = nn.Parameter(torch.randn(17, DIM))
        self.scales = nn.Parameter(torch.rand(16, DIM))

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x).flatten(2).mT
        z = torch.cat((self.cls.expand(len(z), -1, -1), z * (1 + 0 * self.scales)), 1)
        z = self.encoder(z + self.pos_embed)
        return self.head((z + 0.1 * (z @ self.queries.mT).softmax(-1) @ self.queries).mean(1))  # type: ignore[no-any-return]


def test_parameters_of_as_many_rows_are_no_tables() -> None:
    torch.manual_seed(0)
    assert load_module(WithoutTable(), mean=0.5, std=0.5, img_size=32).pos_embed is None
    with pytest.raises(UserError, match="img_size"):
        load_module(WithoutTable(), mean=0.5, std=0.5)


@pytest.mark.parametrize("size", [None, 64, 48])
def test_timms_networks_that_embed_patches_elsewhere_are_read(size: int | None) -> None:
    """NaFlexVit: a linear layer of flattened patches, and a table that is a grid and is stretched
    to pictures of other sizes; layer scale as after training."""
    torch.manual_seed(0)
    sizes: Any = {"embed_dim": DIM, "depth": 2, "num_heads": 4, "num_classes": 10, "img_size": 64}
    network = timm.create_model("naflexvit_base_patch16_gap", pos_embed_grid_size=(4, 4), **sizes)
    for name, scale in network.named_parameters():
        if "gamma" in name:
            nn.init.constant_(scale, 0.1)
    found = leak_of(network, photographs(1, size or 64), img_size=size, attacks="patch_gradient")
    assert (found.best.attack, found.best.exact, found.best.verified) == EQUATION


@pytest.mark.parametrize("name", ["mixer_s32_224", "convnext_atto"])
def test_timms_networks_without_a_table_say_so(name: str) -> None:
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=10)
    nn.init.normal_(network.get_classifier().weight, std=0.02)
    found = leak_of(
        network, photographs(1, 64).repeat(1, 1, 4, 4)[..., :224, :224], img_size=224, attacks=READ
    )
    assert "no table of positions" in found.refused["patch_gradient"]
    assert not any("Error" in why for why in found.refused.values())

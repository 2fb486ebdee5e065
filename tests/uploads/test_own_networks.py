"""Uploads of networks that somebody wrote around torch's own layers, and of grey pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from skimage import data
from torch import Tensor, nn

from attacks.prior.files import find_prior
from mjp_privacy import attack_gradients
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import Pixels
from mjp_privacy.models.live_networks import CalledAttention
from mjp_privacy.uploads.leak import Leak

DIM, PATCH = 96, 8


class Own(nn.Module):
    """A ViT around torch's encoder, as tutorials have it."""

    def __init__(self, side: int = 32, channels: int = 3, *, sine: bool = False, **layer: Any):
        super().__init__()
        self.embed = nn.Conv2d(channels, DIM, PATCH, PATCH)
        table = 0.1 * torch.randn(1, (side // PATCH) ** 2 + 1, DIM)
        self.pos_embed = nn.Parameter(table, requires_grad=not sine)
        self.cls = nn.Parameter(0.1 * torch.randn(1, 1, DIM))
        block = nn.TransformerEncoderLayer(DIM, 4, 3 * DIM, dropout=0, **layer)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.first = bool(layer.get("batch_first"))
        self.head = nn.Linear(DIM, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x).flatten(2).mT
        z = torch.cat((self.cls.expand(len(z), -1, -1), z), 1) + self.pos_embed
        z = self.encoder(z) if self.first else self.encoder(z.transpose(0, 1)).transpose(0, 1)
        return self.head(z.mean(1))  # type: ignore[no-any-return]


def photographs(count: int, side: int = 32) -> Tensor:
    named = [data.astronaut(), data.coffee(), data.chelsea()][:count]
    cuts = [
        torch.from_numpy(one[100 : 100 + 4 * side : 4, 100 : 100 + 4 * side : 4]) for one in named
    ]
    return torch.stack(cuts).permute(0, 3, 1, 2).double() / 255


def leak_of(network: nn.Module, images: Tensor, **given: Any) -> Leak:
    """What a gradient of these pictures (m, C, S, S), normalised by .5 and .5, gives away."""
    network.double().eval()
    loss = nn.functional.cross_entropy(network((images - 0.5) / 0.5), torch.arange(len(images)))
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    sent = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    return attack_gradients(network, sent, images=images, mean=0.5, std=0.5, **given)


@pytest.mark.parametrize(
    "layer",
    [
        {"norm_first": True, "batch_first": True, "activation": "gelu"},
        {"norm_first": True},
        {"batch_first": True},
        {"activation": nn.functional.silu},
    ],
    ids=["before", "before, tokens first", "of sums", "of sums, tokens first"],
)
def test_torchs_encoder_layers_are_read_wherever_they_normalise(layer: dict[str, Any]) -> None:
    """A batch of two, and a table whose gradient is not sent: what no patch equation tells."""
    torch.manual_seed(0)
    batch = leak_of(Own(**layer), photographs(2), attacks="token_peeling", batch=2)
    assert batch.best.exact == 2
    assert batch.best.verified >= 1  # where tokens hardly see each other, mixtures would pass, too
    single = leak_of(Own(sine=True, **layer), photographs(1), attacks="token_peeling")
    assert (single.best.exact, single.best.verified) == (1, 1)


def test_called_attention_computes_what_torchs_does() -> None:
    for first in (True, False):
        torch.manual_seed(1)
        own = nn.MultiheadAttention(12, 3, batch_first=first).double()
        called, (x, y) = CalledAttention(own), torch.randn(2, 4, 5, 12).double()
        assert {id(p) for p in called.parameters()} == {id(p) for p in own.parameters()}
        blocked = torch.ones(4, 4).triu(1).bool() if not first else torch.ones(5, 5).triu(1).bool()
        for given, options in (
            ((x, x, x), {}),
            ((x, x, x), {"average_attn_weights": False}),
            ((x, x, x), {"need_weights": False}),
            ((x, y, y), {}),
            ((x, x, x), {"attn_mask": blocked}),
        ):
            for one, other in zip(called(*given, **options), own(*given, **options), strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# grey pictures ------------------------------------------------------------------------------------


def test_grey_pictures_come_back_from_equations_and_from_tokens() -> None:
    """Also pictures like MNIST's, which are too small for LPIPS."""
    torch.manual_seed(2)
    grey, layer = photographs(1).mean(1, keepdim=True).mul(255).round() / 255, {"norm_first": True}
    plain = leak_of(Own(channels=1, **layer), grey)
    assert (plain.best.attack, plain.best.exact, plain.best.verified) == ("patch_gradient", 1, 1)
    assert plain["patch_gradient"].image.shape == (1, 32, 32)
    small = leak_of(Own(24, 1, sine=True, **layer), grey[..., :24, :24], attacks="token_peeling")
    assert (small.best.exact, small.best.verified) == (1, 1)
    assert small.scores is not None
    assert "lpips" not in small.scores


def test_mean_and_std_of_grey_pictures_are_one_number_each() -> None:
    network = Own(channels=1).eval()
    sent = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    attack_gradients(network, sent, mean=[0.5], std=0.5, attacks="patch_gradient")
    with pytest.raises(UserError, match="one number"):
        attack_gradients(network, sent, mean=[0.4, 0.5, 0.6], std=0.5)


def test_a_prior_of_grey_pictures_is_that_of_their_mean_colour() -> None:
    colour, grey = (find_prior("fitted", patch=16, size=64, channels=c) for c in (3, 1))
    mean, covariance = colour.patch(16, Pixels(64, (0.0,) * 3, (1.0,) * 3))
    centre, spread = grey.patch(16, Pixels(64, (0.0,), (1.0,)))
    torch.testing.assert_close(centre, mean.view(3, 256).mean(0))
    torch.testing.assert_close(spread, covariance.view(3, 256, 3, 256).mean((0, 2)))
    fields = colour.field_spectrum(64, Pixels(64, (0.0,) * 3, (1.0,) * 3))
    torch.testing.assert_close(
        grey.field_spectrum(64, Pixels(64, (0.0,), (1.0,)))[..., 0, 0],
        fields.mean((2, 3)),
        rtol=0.05,  # the logarithm of a mean is interpolated, not the mean of logarithms
        atol=0,
    )

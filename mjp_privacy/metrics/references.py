"""Reference images with all that metrics need of them: computed once, used by many cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mjp_privacy.metrics.contract import Measure, Metric, Prepared, Variant
from mjp_privacy.metrics.pixel import levels, quantise

Key = tuple[str, str]
"""(metric, variant)"""

Step = tuple[Variant, Measure]
"""What is computed once, however many metrics are made of it."""

CACHED = 1 << 17
"""Pixel values of which a processor's cache holds several float64 maps."""


@dataclass(frozen=True)
class References:
    """Reference images of a block, prepared for some metrics on one device.

    `mjp_privacy.metrics.prepare` makes them, `score` takes them in place of images.
    """

    images: Tensor  # (m, C, H, W) in [0, 1], float32 or float64
    levels: Tensor  # (m, C, H, W) uint8: the same on 8 bits, as the paper's variants see them
    alike: bool  # whether both are the same float32 images, so that networks need only see one
    metrics: Mapping[Key, Metric]
    prepared: Mapping[Step, Prepared]

    @classmethod
    def of(cls, images: Tensor, metrics: Mapping[Key, Metric]) -> References:
        """Images (m, C, H, W) in [0, 1], on the device where scores are to be computed."""
        images = images.clamp(0, 1).contiguous()
        on_8_bits = levels(images).to(torch.uint8)
        alike = torch.equal((on_8_bits.double() / 255).float(), images.float())
        known = cls(images, on_8_bits, alike, metrics, {})
        prepared: dict[Step, Prepared] = {}
        for variant, measure in known.steps:
            of_other = prepared.get((_other(variant), measure))
            if of_other is not None and alike and is_network(measure):
                prepared[variant, measure] = of_other
            else:
                parts = [
                    measure.prepare(known.seen(variant, measure.precision, part))
                    for part in known._parts(whole=is_network(measure))
                ]
                prepared[variant, measure] = tuple(map(torch.cat, zip(*parts, strict=True)))
        return replace(known, prepared=prepared)

    @property
    def steps(self) -> list[Step]:
        """What has to be computed for the metrics, in their order."""
        return list(dict.fromkeys((m.variant, m.measure) for m in self.metrics.values()))

    def __len__(self) -> int:
        return len(self.images)

    def at(self, places: slice | list[int]) -> References:
        """The references at these places only."""
        prepared = {
            step: tuple(tensor[places] for tensor in tensors)
            for step, tensors in self.prepared.items()
        }
        return replace(
            self, images=self.images[places], levels=self.levels[places], prepared=prepared
        )

    def seen(self, variant: Variant, precision: torch.dtype, part: slice) -> Tensor:
        """The references at these places, as a variant sees them."""
        if variant == "standard":
            return self.images[part].to(precision)
        return (self.levels[part].double() / 255).to(precision)

    def score(self, reconstructions: Tensor) -> dict[Key, Tensor]:
        """The metrics of reconstructions (m, C, H, W) in [0, 1], one for each reference: (m,)."""
        images = reconstructions.to(self.images.device)
        parts: dict[Step, list[Tensor]] = {step: [] for step in self.steps}
        network_input: dict[Variant, list[Tensor]] = {variant: [] for variant, _ in self.steps}
        for part in self._parts(whole=False):
            entries = images[part].clamp(0, 1).double().contiguous()
            for variant, inputs in network_input.items():
                pixels = quantise(entries) if variant == "paper" else entries
                inputs.append(pixels.float())
                known = self.seen(variant, torch.float64, part)
                for step in self._pixel_steps(variant):
                    prepared = tuple(tensor[part] for tensor in self.prepared[step])
                    parts[step].append(step[1].compare(pixels, known, prepared))
        values = {step: torch.cat(found) for step, found in parts.items() if found}
        values |= self._by_networks({v: torch.cat(given) for v, given in network_input.items()})
        return {
            key: metric.finish(values[metric.variant, metric.measure].double())
            for key, metric in self.metrics.items()
        }

    def _pixel_steps(self, variant: Variant) -> list[Step]:
        return [step for step in self.steps if step[0] == variant and not is_network(step[1])]

    def _by_networks(self, images: Mapping[Variant, Tensor]) -> dict[Step, Tensor]:
        """Values of networks. What is the same float32 image in both variants is seen once."""
        values: dict[Step, Tensor] = {}
        everything = slice(0, len(self))
        for step in self.steps:
            variant, measure = step
            if not is_network(measure):
                continue
            other, new = values.get((_other(variant), measure)), images[variant]
            if other is None or not self.alike:
                known = self.seen(variant, torch.float32, everything)
                values[step] = measure.compare(new, known, self.prepared[step])
                continue
            values[step] = other.clone()
            changed = (new != images[_other(variant)]).flatten(1).any(1).nonzero().flatten()
            if len(changed):
                rest = self.at(changed.tolist()) if len(changed) < len(self) else self
                known = rest.seen(variant, torch.float32, everything)
                values[step][changed] = measure.compare(new[changed], known, rest.prepared[step])
        return values

    def _parts(self, *, whole: bool) -> Iterator[slice]:
        """Places that are computed together: on a CPU so few that their maps stay in its cache."""
        size = self.images[0].numel()
        together = len(self) if whole or self.images.is_cuda else max(1, CACHED // size)
        return (slice(start, start + together) for start in range(0, len(self), together))


def is_network(measure: Measure) -> bool:
    """Whether the measure is computed in float32, on many images at a time."""
    return measure.precision == torch.float32


def _other(variant: Variant) -> Variant:
    return "standard" if variant == "paper" else "paper"

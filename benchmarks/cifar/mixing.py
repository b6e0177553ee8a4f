"""The training images of a run: shifted, flipped, with a square cut out and mixed with others, as its recipe says."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.cifar.data import MEAN, STD, Images
from benchmarks.cifar.kinds import Recipe
from sapwood.recovery import TensorLoader


class Harder(TensorLoader):
    """Batches of images that are harder than the plain ones, until they calm down."""

    def __init__(self, images: Images, recipe: Recipe, pad: int = 4) -> None:
        self.recipe, self.calm = recipe, False
        super().__init__(
            images.x, images.y, min(recipe.batch, len(images.y)), pad=pad, flip=True, cutout=recipe.cutout,
            mean=MEAN, std=STD, drop_last=True, transform=self.mixed if recipe.mixup or recipe.cutmix else None,
        )  # fmt: skip

    def progress(self, step: int, total: int) -> None:
        """Told after each step: for the recipe's share of the steps at the end, images are shifted and flipped only."""
        if self.recipe.calm and step >= total * (1 - self.recipe.calm):
            self.calm, self.cutout = True, 0

    def mixed(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixup: every image and its label with some of another; cutmix: a rectangle of another in its place; where
        there are both, each batch has one of them."""
        r, soft = self.recipe, nn.functional.one_hot(y, 10).float()
        if self.calm:
            return x.contiguous(memory_format=torch.channels_last), soft  # of the same kind: steps may be captured
        blend = bool(r.mixup) and (not r.cutmix or float(torch.rand(())) < 0.5)
        alpha = torch.full((), r.mixup if blend else r.cutmix)
        much = float(torch.distributions.Beta(alpha, alpha).sample())
        other = torch.randperm(len(y), device=y.device)
        if blend:
            mixed = torch.lerp(x[other], x, much)
        else:
            height, width = x.shape[2:]
            top, left = (int(torch.randint(n, ())) for n in (height, width))
            down, across = (min(n, at + round(n * (1 - much) ** 0.5)) for n, at in ((height, top), (width, left)))
            mixed = x.clone()
            mixed[:, :, top:down, left:across] = x[other, :, top:down, left:across]
            much = 1 - (down - top) * (across - left) / (height * width)
        return mixed.contiguous(memory_format=torch.channels_last), torch.lerp(soft[other], soft, much)

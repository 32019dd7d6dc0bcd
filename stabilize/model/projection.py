"""Linear layers whose rows have roles, so that an initialisation can address them though one product makes all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilize import kernels
from stabilize.strategies import Site, Stabilizer
from stabilize.strategies.initialization import Role


class Projection(nn.Module):
    """y = x W^T + b, the rows of W in groups of equal size, one a role.

    Args:
        site: where it stands.
        roles: of the groups, in order.
        inputs: size of x.
        outputs: size of one group.
        stabilizer: draws each group by its role, and may read it in another form.
        biased: how many of the groups, from the first, have a bias; none: all.
    """

    def __init__(
        self,
        site: Site,
        roles: Sequence[Role],
        inputs: int,
        outputs: int,
        stabilizer: Stabilizer,
        biased: int | None = None,
    ) -> None:
        super().__init__()
        self.roles = tuple(roles)
        self.unbiased = 0 if biased is None else (len(roles) - biased) * outputs
        self.weight = nn.Parameter(torch.empty(len(roles) * outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(len(roles) * outputs - self.unbiased))
        groups = list(zip(self.roles, self.weight.detach().chunk(len(roles)), strict=True))
        for role, rows in groups:
            stabilizer.initialization.fill(rows, site, role)
        forms = [stabilizer.forms(rows, site, role) for role, rows in groups]
        self.forms = nn.ModuleList(forms if any(len(form) for form in forms) else [])

    def matrix(self) -> tuple[Tensor, Tensor]:
        """W in the form that it is computed with, and b, zero where a group has none."""
        bias = F.pad(self.bias, (0, self.unbiased)) if self.unbiased else self.bias
        if not self.forms:
            return self.weight, bias
        groups = self.weight.chunk(len(self.forms))
        return torch.cat([form(rows) for form, rows in zip(self.forms, groups, strict=True)]), bias

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, *self.matrix())

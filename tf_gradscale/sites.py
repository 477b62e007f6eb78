"""Sites: the edges of the graph on which scales are chosen, alone or in groups."""

import math


class Site:
    """One edge of the graph on which a scale is chosen.

    Attributes:
        name: The layer's path and the operand, e.g. `"block1_conv/input"`.
        kind: `"gemm"`, `"cast"`, `"branch"`, `"split"`, `"measured"` or `"variable"`.
    """

    def __init__(self, registry, index, name, kind):
        self._registry = registry
        self.index = index
        self.name = name
        self.kind = kind

    @property
    def scale(self):
        """β, the local scale: dimensionless, a power of two, multiplies the gradient."""
        return float(2.0 ** self._registry.local()[self.index])

    @property
    def cumulative_scale(self):
        """α, the product of all local scales from the loss to this edge (a power of two)."""
        return float(2.0 ** self._registry.cumulative()[self.index])

    @property
    def backoff(self):
        """How far the scale has retreated from overflow: 0 is not at all; 1 halves its binades."""
        return float(self._registry.history()[0, self.index])

    def __repr__(self):
        return (
            f"<Site {self.name} kind={self.kind} scale={power(self.scale)} "
            f"cumulative_scale={power(self.cumulative_scale)}>"
        )


class Group:
    """Sites whose scales are chosen together, and their part of the registry's vector.

    The part holds how much of its height each of the n sites has given up after overflows; log2 β
    of each, log2 α of each, and a magnitude of the gradient there, 0 if there was none to measure;
    then a magnitude of the gradient that arrived, which may not be finite; then powers of two: 2^β
    of each site (or, where gradients meet, what each is multiplied by) and 1/α of each.
    """

    def __init__(self, index, start, sites, factors):
        self.index = index
        self.start = start
        self.sites = sites
        n = len(sites)
        # Where nothing has been chosen yet, all scales are 2^0.
        self.initial = [0.0] * (3 * n) + [1.0] * (n + 1 + factors)
        self.size = len(self.initial)

    def position(self, site, field):
        """Where a field of one of its sites stands in the registry's vector."""
        row = ("retreat", "local", "cumulative", "magnitude").index(field)
        return self.start + row * len(self.sites) + self.sites.index(site)

    @property
    def given(self):
        """Where the magnitude of the gradient that arrived stands in the registry's vector."""
        return self.start + 4 * len(self.sites)


def power(value):
    """A scale as a table shows it."""
    return f"2^{round(math.log2(value))}"

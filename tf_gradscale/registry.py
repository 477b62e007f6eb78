"""The scale registry: every scale of a model, in one vector."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tf_gradscale import estimate

# Passes 0, 1, 2, 4, ... up to this one choose scales anew, whatever `update_every` is.
_LAST_EARLY_UPDATE = 64
# A site that has nothing to measure is measured again in the next pass, at most so often in a row.
_PATIENCE = 64.0


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
        return float(2.0 ** self._registry.read("local")[self.index])

    @property
    def cumulative_scale(self):
        """α, the product of all local scales from the loss to this edge (a power of two)."""
        return float(2.0 ** self._registry.read("cumulative")[self.index])

    @property
    def backoff(self):
        """How far the scale has retreated from overflow: 0 is not at all, each 1 halves the binades."""
        return float(self._registry.read("backoff")[self.index])

    def __repr__(self):
        return (
            f"<Site {self.name} kind={self.kind} scale={_power(self.scale)} "
            f"cumulative_scale={_power(self.cumulative_scale)}>"
        )


class ScaleRegistry:
    """The scales of one model, and the state that choosing them needs.

    Iterating gives the sites in the order in which backpropagation meets them. All scales live in
    one float32 `tf.Variable` (as log2), which an updating pass writes once, at its end.

    State, in `variables` (it is optimizer state, as Keras' own loss scale is):

    - `scales`: for each site log2 β, log2 α, its back-off and how often in a row it was all zero;
      then the powers of two that a pass multiplies by, derived from these.
    - `passes`: how many backward passes there were.
    - `pending`: 1 if the next pass must choose scales anew, else 0.
    - `frozen`: 1 if scales are fixed, else 0.

    Example:

    >>> model = convert(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    >>> [site.name for site in model.scales]
    ['dense/output', 'dense/kernel', 'dense/input']
    """

    _ROWS = ("local", "cumulative", "backoff", "zeros")

    def __init__(self, config):
        self.config = config
        self._sites = []
        self._factors = 0
        self._variables = None

    def add_site(self, name, kind):
        """Adds a site; names are made unique by a number. Returns the `Site`."""
        taken = {site.name for site in self._sites}
        unique, count = name, 1
        while unique in taken:
            unique, count = f"{name}_{count}", count + 1
        self._sites.append(Site(self, len(self._sites), unique, kind))
        return self._sites[-1]

    def add_factor(self):
        """Reserves a place for a derived power of two. Returns its index."""
        self._factors += 1
        return self._factors - 1

    def build(self):
        """Creates the variables, once all sites are known."""

        def create(name, shape, dtype, initializer):
            # Replicas choose their scales themselves; what is saved is the first one's.
            return keras.Variable(
                initializer,
                shape=shape,
                dtype=dtype,
                trainable=False,
                autocast=False,
                aggregation="only_first_replica",
                synchronization="on_read",
                name=name,
            )

        size = len(self._sites) * len(self._ROWS)
        initial = np.concatenate([np.zeros(size), np.ones(self._factors)]).astype("float32")
        with tf.init_scope():
            self._variables = {
                "scales": create("scales", initial.shape, "float32", lambda *a, **k: initial),
                "passes": create("passes", (), "int64", "zeros"),
                "pending": create("pending", (), "int32", "zeros"),
                "frozen": create("frozen", (), "int32", "zeros"),
            }

    @property
    def variables(self):
        """The state, a list of `keras.Variable`."""
        return list(self._variables.values())

    def __iter__(self):
        return iter(self._sites)

    def __len__(self):
        return len(self._sites)

    def __getitem__(self, name):
        for site in self._sites:
            if site.name == name:
                return site
        raise KeyError(
            f"No site has this name. Iterate over the registry to see all. Received: name={name!r}"
        )

    def read(self, row):
        """One row of the state as a NumPy array, an entry per site."""
        values = keras.ops.convert_to_numpy(self._variables["scales"])
        n = len(self._sites)
        start = self._ROWS.index(row) * n
        return values[start : start + n]

    def begin(self):
        """What a pass starts from: its `State`, as a function, and whether it updates (bool)."""
        with keras_autocast_off():
            scales, passes, pending, frozen = (
                tf.convert_to_tensor(v.value) for v in self._variables.values()
            )
        every = self.config.update_every
        early = (passes <= min(_LAST_EARLY_UPDATE, every)) & (tf.bitwise.bitwise_and(passes, passes - 1) == 0)
        scheduled = (early | (passes % every == 0)) & (frozen == 0)
        return lambda: State(self, scales, frozen > 0), scheduled | (pending > 0)

    def end(self, scales, pending):
        """Writes what a pass has chosen. Returns the operations to depend on (none in eager)."""
        with keras_autocast_off():
            writes = [
                self._variables["scales"].value.assign(scales),
                self._variables["passes"].value.assign_add(1),
                self._variables["pending"].value.assign(pending),
            ]
        return [] if tf.executing_eagerly() else writes

    def request_update(self):
        """Has the next pass choose scales anew."""
        self._variables["pending"].assign(1)

    def freeze(self, scales=None):
        """Fixes local scales and stops updating.

        Args:
            scales: Local scales β, powers of two: a dictionary by site name, or a function that
                takes a `Site` and returns its β. Sites that a dictionary does not name, and all
                sites if it is `None`, keep the β they have. A frozen branch or split multiplies
                the largest α of the gradients that meet there by its β.

        Raises:
            ValueError: If a scale is not a positive power of two, or a name is not a site's.
        """
        local = self.read("local").copy()
        if scales is not None and not callable(scales):
            unknown = sorted(set(scales) - {site.name for site in self._sites})
            if unknown:
                raise ValueError(
                    "`freeze` takes local scales by site name; these are no sites of the model: "
                    f"{unknown}. Its sites: {[site.name for site in self._sites]}"
                )
        for site in self._sites if scales is not None else ():
            value = scales(site) if callable(scales) else scales.get(site.name, site.scale)
            mantissa, exponent = np.frexp(float(value))
            if mantissa != 0.5 or not -120 <= exponent <= 120:
                raise ValueError(
                    "A scale must be a positive power of two between 2^-120 and 2^120. "
                    f"Received: {value!r} for site {site.name!r}"
                )
            local[site.index] = exponent - 1
        values = keras.ops.convert_to_numpy(self._variables["scales"]).copy()
        values[: len(local)] = local
        self._variables["scales"].assign(values)
        self._variables["frozen"].assign(1)
        self.request_update()

    def unfreeze(self):
        """Resumes updating, from the next pass on."""
        self._variables["frozen"].assign(0)
        self.request_update()

    def __str__(self):
        width = max([len(site.name) for site in self._sites] + [4])
        lines = [f"{'site':<{width}}  {'kind':<8}  {'scale':>6}  {'cumulative':>10}"]
        for site in self._sites:
            lines.append(
                f"{site.name:<{width}}  {site.kind:<8}  {_power(site.scale):>6}  "
                f"{_power(site.cumulative_scale):>10}"
            )
        return "\n".join(lines)


class State:
    """The registry's vector inside one pass: what was stored, and what the pass writes anew."""

    def __init__(self, registry, scales, frozen):
        n = len(registry)
        self.registry = registry
        self.frozen = frozen
        self.vector = scales
        self._stored = tf.unstack(scales)
        self._rows = {row: i * n for i, row in enumerate(registry._ROWS)}
        self._first_factor = n * len(registry._ROWS)
        self._written = {}

    def stored(self, row, site):
        """What the last updating pass wrote for `site`."""
        return self._stored[self._rows[row] + site.index]

    def write(self, row, site, value):
        """What this pass chose for `site`."""
        self._written[self._rows[row] + site.index] = value

    def stored_factor(self, index):
        """A power of two that the last updating pass derived."""
        return self._stored[self._first_factor + index]

    def write_factor(self, index, value):
        """A power of two that this pass derived."""
        self._written[self._first_factor + index] = value

    def result(self):
        """The vector to store: what was written over what was stored."""
        return tf.stack([self._written.get(i, v) for i, v in enumerate(self._stored)])


def patient(zeros):
    """Whether a site that was all zero for so many passes in a row is measured in the next one."""
    return zeros < _PATIENCE


@contextlib.contextmanager
def keras_autocast_off():
    """Reads of Keras variables give the stored float32 value, not a cast one."""
    # keras.src: AutocastScope is not exported; tests/test_platform.py notices if it goes.
    from keras.src.backend import AutocastScope

    with AutocastScope(None):
        yield


def _power(value):
    return f"2^{int(estimate.math.log2(value))}"

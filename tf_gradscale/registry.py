"""The scale registry: every scale of a model, in one vector."""

import contextlib
import math
import zlib
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

# keras.src: not exported; tests/test_platform.py notices if it goes.
from keras.src.backend import AutocastScope

from tf_gradscale.sites import Group, Site, power
from tf_gradscale.tensors import cast, multiply


class ScaleRegistry:
    """The scales of one model, and the state that choosing them needs.

    Iterating gives the sites in the order in which backpropagation meets them. All scales live in
    one float32 variable (as log2), which an updating pass writes once, at its end.

    State, in `variables` (it is optimizer state, as Keras' own loss scale is):

    - `scales`: for each group of sites what `Group` says.
    - `history`: for each site its back-off, and how often in a row it was all zero.
    - `passes`: how many backward passes there were.
    - `chosen`: the number of the pass that last chose scales, counted from 0; -1 if none has.
    - `pending`: 1 if the next pass must choose scales anew, else 0.
    - `frozen`: 1 if scales are fixed, else 0.
    - `peaks`: for each output the largest magnitude of the gradient that came in when scales were
      last chosen.
    - `layout`: a checksum of the sites' kinds, by which a file for another graph is known.
    - `inverses` and `unapplied`, with `unscale="optimizer"` only: for each variable 1/α of the
      gradient that the last pass gave it; and 1 if that is still to be applied, else 0. Until then
      no pass chooses scales.

    Example:

    >>> model = convert(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    >>> [(site.kind, site.scale) for site in model.scales]
    [('variable', 1.0), ('gemm', 1.0)]
    """

    def __init__(self, config):
        self.config = config
        self.groups = []
        self._sites = []
        self._group_of = {}
        # Groups with what was asked for; and those that the present graph has not asked for yet.
        self._keys, self._free = [], {}
        self._variables = None
        self.counters = []

    def begin(self):
        """Begins the sites of another graph of the same model: those it has already are shared."""
        self._free = {}
        for key, group in self._keys:
            self._free.setdefault(key, []).append(group)

    def add_group(self, names_and_kinds, factors):
        """Adds sites that are chosen together, or finds them.

        Args:
            names_and_kinds: A list of (name, kind); names are made unique by a number.
            factors: How many derived powers of two go with them.

        Returns:
            The `Group`.
        """
        key = tuple(names_and_kinds), factors
        if self._free.get(key):
            return self._free[key].pop(0)
        if self.is_built:
            raise ValueError(
                "The first call of a model must go through all layers and operations that later "
                "ones use, whose scales are made then. Make the fullest call first. "
                f"Received: a call with {names_and_kinds[0][0]!r} besides"
            )
        sites = []
        for name, kind in names_and_kinds:
            taken = {site.name for site in self._sites}
            unique, count = name, 1
            while unique in taken:
                unique, count = f"{name}_{count}", count + 1
            self._sites.append(Site(self, len(self._sites), unique, kind))
            sites.append(self._sites[-1])
        start = sum(group.size for group in self.groups)
        self.groups.append(Group(len(self.groups), start, sites, factors))
        self._group_of.update(dict.fromkeys(sites, self.groups[-1]))
        self._keys.append((key, self.groups[-1]))
        return self.groups[-1]

    def build(self, weights, outputs):
        """Creates the variables, once all sites are known.

        Args:
            weights: The Keras variables whose gradients the model's backward pass makes.
            outputs: How many outputs the model has.
        """
        self._weights = {id(weight): i for i, weight in enumerate(weights)}

        def create(name, value, dtype):
            value = np.asarray(value, dtype)
            # Replicas choose their scales themselves; what is saved is the first one's.
            return keras.Variable(
                lambda *args, **kwargs: value,
                shape=value.shape,
                dtype=dtype,
                trainable=False,
                autocast=False,
                aggregation="only_first_replica",
                synchronization="on_read",
                name=name,
            )

        initial = [value for group in self.groups for value in group.initial]
        with tf.init_scope():
            self._variables = {
                "scales": create("scales", initial, "float32"),
                "history": create("history", np.zeros((2, len(self))), "float32"),
                "passes": create("passes", 0, "int64"),
                "chosen": create("chosen", -1, "int64"),
                "pending": create("pending", 0, "int32"),
                "frozen": create("frozen", 0, "int32"),
                "peaks": create("peaks", [0.0] * outputs, "float32"),
                "layout": create("layout", self._layout(), "int64"),
            }
            if self.config.unscale == "optimizer":
                self._variables["inverses"] = create("inverses", [1.0] * len(weights), "float32")
                self._variables["unapplied"] = create("unapplied", 0, "int32")
        for counters in self.counters:
            counters.build(self._sites)

    def count(self, counters):
        """Takes `counters.Counters`: they count in graphs that are traced while they are active."""
        self.counters.append(counters)
        if self.is_built:
            counters.build(self._sites)

    def _layout(self):
        # Not their names: Keras counts layers of a kind through, in each process anew.
        groups = [" ".join(site.kind for site in group.sites) for group in self.groups]
        return zlib.crc32(", ".join(groups).encode())

    @property
    def layout(self):
        """The variable that tells the sites of one model from those of another."""
        return self._variables["layout"]

    @property
    def is_built(self):
        """Whether the variables exist: no site can be added any more."""
        return self._variables is not None

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

    def group_of(self, site):
        """The `Group` that a site belongs to."""
        return self._group_of[site]

    def positions(self, field):
        """Where a field of each site stands in the vector, in the order of the sites."""
        return [self._group_of[site].position(site, field) for site in self._sites]

    def are_inverses(self):
        """Which entries of the vector are 1/α of a site: a list of bools."""
        found = []
        for group in self.groups:
            found += [i >= group.size - len(group.sites) for i in range(group.size)]
        return found

    def local(self):
        """log2 β of every site, a NumPy array."""
        return self._numpy("scales")[self.positions("local")]

    def cumulative(self):
        """log2 α of every site, a NumPy array."""
        return self._numpy("scales")[self.positions("cumulative")]

    def history(self):
        """Back-off and number of zero measurements in a row, an array of shape (2, sites)."""
        return self._numpy("history")

    def _numpy(self, name):
        return keras.ops.convert_to_numpy(self._variables[name])

    def read(self):
        """The state inside a graph: a dictionary of tensors."""
        with autocast_off():
            return {
                name: tf.convert_to_tensor(variable.value)
                for name, variable in self._variables.items()
                if name != "layout"
            }

    def write(self, scales, history, pending, peaks, chosen, inverses):
        """Ends a pass.

        Args:
            scales, history, pending, peaks, chosen: What the pass leaves of each.
            inverses: By a variable's id, 1/α of the gradient that the pass gives it.

        Returns:
            The writing operations.
        """
        values = {
            "scales": scales,
            "history": history,
            "pending": pending,
            "peaks": peaks,
            "chosen": chosen,
        }
        with autocast_off():
            if self.config.unscale == "optimizer":
                before = tf.unstack(tf.convert_to_tensor(self._variables["inverses"].value))
                pairs = zip(self._weights, before, strict=True)
                values["inverses"] = tf.stack([inverses.get(weight, old) for weight, old in pairs])
                values["unapplied"] = tf.constant(1)
            writes = [self._variables[name].value.assign(v) for name, v in values.items()]
            writes.append(self._variables["passes"].value.assign_add(1))
        return writes

    def unscale(self, gradients, weights):
        """Divides gradients by the scales with which the last pass gave them, in float32.

        Args:
            gradients: A list of gradients, `None` for none.
            weights: Their Keras variables.

        Returns:
            The gradients, float32.
        """
        with autocast_off():
            inverses = tf.unstack(tf.convert_to_tensor(self._variables["inverses"].value))
            self._variables["unapplied"].value.assign(0)
        unscaled = []
        for gradient, weight in zip(gradients, weights, strict=True):
            index = self._weights.get(id(weight))
            if gradient is not None and index is not None:
                gradient = multiply(cast(gradient, tf.float32), inverses[index])
            unscaled.append(gradient)
        return unscaled

    @property
    def frozen(self):
        """Whether scales are fixed."""
        with tf.init_scope():
            return bool(self._numpy("frozen"))

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
            TypeError: If `scales` is none of these.
            ValueError: If a scale is not a positive power of two, or a name is not a site's.
        """
        if scales is not None and not callable(scales) and not isinstance(scales, Mapping):
            raise TypeError(
                "`scales` must be a dictionary from the names of sites to scales, a function of a "
                "site, or None to keep those there are; the same for all is `lambda site: 1.0`. "
                f"Received: scales={scales!r}"
            )
        values = self._numpy("scales").copy()
        if scales is not None and not callable(scales):
            unknown = sorted(set(scales) - {site.name for site in self._sites})
            if unknown:
                raise ValueError(
                    "`freeze` takes local scales by the names of sites, of which the model has "
                    f"{[site.name for site in self._sites]}. Received besides: {unknown}"
                )
        for site, position in zip(self._sites, self.positions("local"), strict=True):
            if scales is None or (not callable(scales) and site.name not in scales):
                continue
            value = scales(site) if callable(scales) else scales[site.name]
            mantissa, exponent = math.frexp(float(value))
            if mantissa != 0.5 or not -120 <= exponent <= 120:
                raise ValueError(
                    "A scale must be a positive power of two between 2^-120 and 2^120. "
                    f"Received: {value!r} for site {site.name!r}"
                )
            values[position] = exponent - 1
        self._variables["scales"].assign(values)
        self._variables["frozen"].assign(1)
        self.request_update()

    def unfreeze(self):
        """Resumes updating, from the next pass on."""
        self._variables["frozen"].assign(0)
        self.request_update()

    def __repr__(self):
        width = max([len(site.name) for site in self._sites] + [4])
        lines = [f"{'site':<{width}}  {'kind':<8}  {'scale':>6}  {'cumulative':>10}"]
        local, cumulative = self.local(), self.cumulative()
        for site in self._sites:
            lines.append(
                f"{site.name:<{width}}  {site.kind:<8}  {power(2.0 ** local[site.index]):>6}  "
                f"{power(2.0 ** cumulative[site.index]):>10}"
            )
        return "\n".join(lines)


@contextlib.contextmanager
def autocast_off():
    """Within this scope, Keras variables give their stored float32 value, not a cast one."""
    with AutocastScope(None):
        yield


def variable_value(variable):
    """The `tf.Variable` behind a Keras variable, uncast."""
    with autocast_off():
        return variable.value

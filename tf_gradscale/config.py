"""How scales are chosen: one frozen, validated, serializable value."""

import dataclasses
import math

import keras

from tf_gradscale import formats

_CHOICES = {
    "placement": ("balanced", "threshold"),
    "smallest": ("subnormal", "normal"),
    "cast_model": ("lognormal", "normal", "histogram"),
    "unscale": ("layer", "optimizer"),
}


@keras.saving.register_keras_serializable(package="tf_gradscale")
@dataclasses.dataclass(frozen=True)
class GradScaleConfig:
    """Settings of gradient scaling. The defaults need no tuning.

    Args:
        gradient_dtype: Name of the format that gradients are kept in. Gradients of this dtype are
            scaled; those of any other dtype keep scale 1, so a float32 or bfloat16 model is left
            as it is.
        underflow_threshold: γ', the share of a gradient's entries (a rate, between 0 and 1) that
            may fall to or below λ_min. The paper's only hyperparameter.
        placement: `"balanced"` leaves as many binades free above the largest value as below the
            γ'-quantile. `"threshold"` is the paper's choice: the smallest power of two whose
            predicted underflow rate is at most γ' (Section 4.2), and nothing that the paper does
            not have (no scale for variable gradients, no measured scales, no back-off).
        smallest: λ_min, the magnitude at which a value counts as lost: the format's smallest
            `"subnormal"` or smallest `"normal"` number.
        margin_bits: Binades kept free below λ_max wherever a bound is met, since a scale serves
            until the next update.
        update_every: Scales are chosen anew in passes 0, 1, 2, 4, ... 64 and then every
            `update_every` passes. A pass is one backward pass through the model.
        cast_model: Model of the gradient that a cast receives: `"lognormal"` (Theorem 2),
            `"normal"`, or `"histogram"` of exponents, which needs no model and is exact to a
            power of two.
        scale_bound: Largest local scale β of activations' gradients, rounded down to a power of
            two, or `None` for no bound.
        cumulative_bound: Largest cumulative scale α, likewise, or `None` for none but 2^100.
        unscale: Where a variable's gradient is divided by its scale: `"layer"` (gradients leave
            the tape with their true magnitude) or `"optimizer"` (they leave it scaled, and must
            be applied by the `GradScaleOptimizer` of `Model.compile`, which divides).
        max_skips: After so many steps in a row that were skipped because a gradient was not
            finite, training stops with an error.

    Raises:
        ValueError: If a value is outside its domain.

    Example:

    >>> GradScaleConfig(update_every=10).update_every
    10
    >>> GradScaleConfig.paper().placement
    'threshold'
    """

    gradient_dtype: str = "float16"
    underflow_threshold: float = 1e-3
    placement: str = "balanced"
    smallest: str = "subnormal"
    margin_bits: int = 4
    update_every: int = 100
    cast_model: str = "lognormal"
    scale_bound: float | None = None
    cumulative_bound: float | None = None
    unscale: str = "layer"
    max_skips: int = 20

    def __post_init__(self):
        if self.gradient_dtype not in formats.NAMES:
            raise ValueError(
                f"`gradient_dtype` must be one of {formats.NAMES}. "
                f"Received: gradient_dtype={self.gradient_dtype!r}"
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` must be one of {allowed}. Received: {name}={getattr(self, name)!r}"
                )
        rate = self.underflow_threshold
        if not isinstance(rate, (int, float)) or not 0.0 < rate < 1.0:
            raise ValueError(
                "`underflow_threshold` is the share of gradient entries that may underflow; it "
                "must lie strictly between 0 and 1 (the paper uses 0.001). "
                f"Received: underflow_threshold={rate!r}"
            )
        for name, least in (("margin_bits", 0), ("update_every", 1), ("max_skips", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"`{name}` must be an integer of at least {least}. Received: {name}={value!r}"
                )
        if self.margin_bits > 10:
            raise ValueError(
                "`margin_bits` binades are kept free below the largest number; more than 10 leave "
                f"float16 too few for the gradient. Received: margin_bits={self.margin_bits}"
            )
        for name in ("scale_bound", "cumulative_bound"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"`{name}` must be a positive number, or None for no bound. "
                    f"Received: {name}={value!r}"
                )

    @classmethod
    def paper(cls, **changes):
        """The method as published: smallest sufficient scales, and no more than Algorithm 1 says.

        Args:
            **changes: Arguments that differ from the published ones.

        Returns:
            A `GradScaleConfig`.

        Reference:
            Zhao et al., *Reducing Underflow in Mixed Precision Training by Gradient Scaling*,
            IJCAI 2020, Algorithm 1 and Section 4.2.
        """
        return cls(**{"placement": "threshold", **changes})

    def get_config(self):
        """The arguments, as a dictionary that `from_config` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config):
        """The configuration that `get_config` described."""
        return cls(**config)

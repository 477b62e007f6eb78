"""What all tests share: a fresh state for each, and the ways in which a function can be run."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import keras
import pytest
import tensorflow as tf

import tf_gradscale as gs

# Two devices, so that replicas can be tested on any machine. Must come before anything runs.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

# The same examples in every run; the first ones of TensorFlow compile kernels and take seconds.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("same")

MODES = {
    "eager": lambda function: function,
    "graph": tf.function,
    "xla": lambda function: tf.function(function, jit_compile=True),
}


@pytest.fixture(autouse=True)
def fresh_state():
    """Default policy and configuration, fixed seeds and layer names, whatever ran before."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    gs.set_global_policy("float32")
    yield
    gs.set_global_policy("float32")


@pytest.fixture(params=MODES)
def mode(request):
    """How functions are run: "eager", "graph" or "xla"."""
    return request.param


@pytest.fixture
def run(mode):
    """Wraps a function so that it is run in the `mode`: `run(function)(*args)`."""
    return MODES[mode]


@pytest.fixture(scope="session")
def mirrored():
    """Two CPU devices. One object for all tests: a second one would use its collectives' names."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(params=["one", "mirrored"])
def strategy(request):
    """One device, or two CPU devices (on which XLA fails for plain Keras too)."""
    if request.param == "one":
        return tf.distribute.get_strategy()
    return request.getfixturevalue("mirrored")

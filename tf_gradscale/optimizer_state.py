"""An optimizer's state in a file: whether it is that of the same optimizer and the same scales."""

import numpy as np


def check_saved(store, variables, layout):
    """Refuses the state of another optimizer or model, which Keras would take if shapes allow it.

    Args:
        store: The saved arrays, by their index as a string.
        variables: The optimizer's variables.
        layout: That one of them by which the sites of a model are known (`ScaleRegistry.layout`),
            or `None` if it has no scales.

    Raises:
        ValueError: If number, shapes or sites are others.
    """
    found = {name: tuple(store[name].shape) for name in store.keys()}
    wanted = {str(i): tuple(v.shape) for i, v in enumerate(variables)}
    if found != wanted:
        differing = sorted(set(found.items()) ^ set(wanted.items()), key=lambda x: int(x[0]))
        name = differing[0][0]
        raise ValueError(
            "The state of an optimizer must be loaded into the same optimizer of the same "
            "model, but it was saved with another optimizer, model or version. To take the "
            "weights alone, load them before `compile`. "
            f"Received: {len(found)} variables, expected {len(wanted)}; the first difference "
            f"is variable {name}, of shape {found.get(name)}, expected {wanted.get(name)}"
        )
    if layout is None:
        return
    (index,) = (i for i, v in enumerate(variables) if v is layout)
    saved = int(np.array(store[str(index)]))
    if saved != int(layout.numpy()):
        raise ValueError(
            "The scales in a file must be those of the same layers in the same dtypes. "
            "Build the model under the dtype policy that it was saved with, such as "
            'tf_gradscale.set_global_policy("mixed_float16"). '
            f"Received: sites with the checksum {saved}, expected {int(layout.numpy())}"
        )

"""What sees all tensors of a step."""


class Observer:
    """Sees what a region makes (`Region.observer`).

    Args:
        plain: Whether the region is run without its own backward pass.
    """

    def __init__(self, plain):
        self.plain = plain
        self.outputs, self.gradients, self.variables = {}, {}, {}

    def see_outputs(self, step, outputs):
        """Takes a step's outputs."""
        for i, y in enumerate(outputs):
            if y.dtype.is_floating and not step.outputs[i].weight:
                name = step.name if len(outputs) == 1 else f"{step.name}[{i}]"
                self.outputs[id(step.outputs[i])] = name, y

    def see_gradients(self, step, pairs):
        """Takes the `Scaled`s that arrive at a step's outputs."""
        for tensor, pair in zip(step.outputs, pairs, strict=True):
            if pair is not None:
                self.gradients[id(tensor)] = pair.gradient, float(pair.inverse)

    def see_walk(self, walk):
        """Takes what a walk is given as gradients of variables."""
        add = walk.add

        def observed(variable, gradient, inverse):
            self.variables.setdefault(id(variable), []).append((gradient, float(inverse)))
            add(variable, gradient, inverse)

        walk.add = observed

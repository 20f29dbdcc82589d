"""Hooks that a script has registered on parameters: they see the gradient of the global batch, once a pass.

In backward, a parameter's gradient is that of one micro-batch, times its part of the global batch. A hook that clamps
or masks would act by limits that follow from shares. So these hooks rest in backward and are called after the
reduction, with what they see in one process that has the whole batch. A hook on an activation needs none of this: the
factors make its gradient that of one process already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

OWN = "heterotrain."


@dataclass(slots=True)
class ScriptHooks:
    """The hooks that rest in the current pass.

    Attributes:
        resting: parameter, torch's table of its hooks, number in it, hook, and whether it returns a gradient.
    """

    resting: list[tuple[torch.nn.Parameter, dict[int, Any], int, Callable[..., Any], bool]] = field(
        default_factory=list
    )

    def rest(self, parameter: torch.nn.Parameter, own: Collection[int]) -> None:
        """Let the script's hooks on a parameter rest; ``own`` has the numbers of the library's hooks.

        A number stays in its place, so that the script can remove the hook.
        """
        if type(parameter) is not torch.nn.Parameter:
            return  # a divided one, whose hooks see parts
        for name, returns in (("_backward_hooks", True), ("_post_accumulate_grad_hooks", False)):
            hooks: dict[int, Any] = getattr(parameter, name) or {}
            for number, hook in hooks.items():
                if number not in own and not str(getattr(hook, "__module__", "")).startswith(OWN):
                    self.resting.append((parameter, hooks, number, hook, returns))
                    hooks[number] = _rest

    def wake(self) -> None:
        """Put the hooks back."""
        for _, hooks, number, hook, _ in self.resting:
            if number in hooks:
                hooks[number] = hook
        self.resting.clear()

    def call(self) -> None:
        """Call the hooks with the gradients, which may change them, and put them back."""
        resting = list(self.resting)
        self.wake()
        with torch.no_grad():
            for parameter, hooks, number, hook, returns in resting:
                gradient = parameter.grad
                if gradient is None or number not in hooks:
                    continue
                if not returns:
                    hook(parameter)
                elif (changed := hook(gradient)) is not None:
                    gradient.copy_(changed)


def _rest(_gradient: torch.Tensor) -> None:
    """Stand in a hook's place."""

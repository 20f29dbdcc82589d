"""What a script must not do to gradients while they are added up, in sentences."""

TWICE = (
    "a parameter got its gradient twice in one backward pass. Call step.backward once for each micro-batch, and "
    "checkpoint activations with use_reentrant=False."
)
CHANGED = (
    "gradients were changed before all of the step's gradients had been added up over ranks: move this (zero_grad, "
    "clip_grad_norm_, scaler.unscale_, …) behind the loop over step.micro_batches(), where they are complete, or leave "
    "it out. A step begins without gradients, and step.apply(optimizer, clip_norm=…) clips."
)
CLEARED = (
    "the step's gradients were dropped before step.apply, so it would change nothing: leave out optimizer.zero_grad(), "
    "because each step begins without gradients"
)
THAWED = (
    "parameters were frozen, unfrozen or replaced while the step's gradients were computed: do this before the loop "
    "over step.micro_batches(), whose body a rank without samples does not run"
)

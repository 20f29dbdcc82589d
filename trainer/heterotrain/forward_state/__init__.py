"""State that layers change in their forward passes: statistics, observers, codebooks, momentum encoders.

Such a tensor is a persistent buffer or a frozen parameter. Every micro-batch of a pass starts from the same value ``s``
and leaves its own, ``s_ij`` for micro-batch j of rank i with ``n_ij`` of the pass's ``n`` samples. After the pass, each
rule (``rules.py``) makes one value of them, the same on all ranks:

    mean    s + sum_ij n_ij/n (s_ij - s)
    sum     d s + sum_ij (s_ij - d s), with decay d
    min     the least s_ij, element by element; max likewise
    leader  that of the batch's first micro-batch

So the value does not depend on how the batch is divided, wherever the rule follows the layer's own arithmetic. Samples
with weight zero leave no trace. Between steps these tensors are replicated state like weights: they are in checkpoints,
in the state of joining ranks and in the fingerprint.

``state.py`` has the interface, ``kinds.py`` knows torch's own layers, and ``combining.py`` the arithmetic.
"""

"""Trainings that hypothesis draws: model, data, loss, optimizer and precision, and how the work is divided."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.fault_injectors import STEP_PLACES
from distributed.training_setup import TrainingSetup
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTraining:
    """A training and how it is divided.

    Attributes:
        setup: model, data, loss and optimizer.
        batch_samples: the global batch.
        epochs: of the training.
        vectors: shares by rank, each used for some steps.
        micro: largest micro-batch by rank; 0 for the whole share.
        bucket_mib: size of gradient buckets.
        lost: the step and place at which the last of at least three ranks is lost.
    """

    setup: TrainingSetup
    batch_samples: int
    epochs: int
    vectors: tuple[tuple[int, ...], ...]
    micro: tuple[int, ...]
    bucket_mib: float
    lost: tuple[int, str] | None

    @property
    def tolerance(self) -> float:
        """Largest difference, relative; in FP32 and BF16, sums of other micro-batches are rounded in another way."""
        if self.setup.autocast:
            return 1e-2
        return 1e-10 if self.setup.dtype == "float64" else 1e-4


@st.composite
def drawn_trainings(draw: st.DrawFn) -> DrawnTraining:
    """Draw a training; no step is without weight, because plain torch has no result for it."""
    ranks, batch = draw(st.integers(2, 4)), draw(st.integers(6, 20))
    precision = draw(st.sampled_from(("FP64", "FP64", "FP64", "FP32", "BF16")))
    batch_norm = draw(st.integers(0, 3)) == 3
    error = draw(st.sampled_from(("squares", "huber", "classes")))
    setup = TrainingSetup(
        samples=batch * draw(st.integers(2, 3)) + draw(st.sampled_from((0, 5))),
        dtype="float64" if precision == "FP64" else "float32",
        autocast=precision == "BF16",
        batch_norm=batch_norm,
        # Before a BatchNorm, gradients of biases are zero but for rounding; Adam makes whole steps of them.
        adam=precision == "FP64" and not batch_norm and draw(st.booleans()),
        tokens=error != "classes" and draw(st.booleans()),
        error=error,
        decay=draw(st.sampled_from((1.0, 0.9))),
        clip_norm=draw(st.sampled_from((None, None, 0.1, 2.0))),
        clip_value=draw(st.sampled_from((None, None, 0.05))),
        stream=draw(st.booleans()),
        widths=tuple(draw(st.lists(st.sampled_from((3, 8, 16)), min_size=1, max_size=3))),
        tied=draw(st.booleans()),
        # SAM divides by the gradient's norm, which rounding in FP32 and BF16 changes by more than the tolerance.
        passes=draw(st.sampled_from(("one", "one", "updates", "ascent"))) if precision == "FP64" else "one",
    )
    cuts = st.lists(st.integers(0, batch), min_size=ranks - 1, max_size=ranks - 1).map(sorted)
    vectors = tuple(
        tuple(stop - start for start, stop in zip((0, *ends), (*ends, batch), strict=True))
        for ends in draw(st.lists(cuts, min_size=1, max_size=3))
    )
    places = st.tuples(st.integers(0, 2), st.sampled_from(STEP_PLACES))
    return DrawnTraining(
        setup=setup,
        batch_samples=batch,
        epochs=draw(st.integers(1, 2)),
        vectors=vectors,
        micro=(0,) * ranks if batch_norm else draw(st.tuples(*[st.integers(0, 5)] * ranks)),
        bucket_mib=draw(st.sampled_from((0.0001, 0.001, 25.0))),
        lost=draw(places) if ranks > 2 and draw(st.booleans()) else None,
    )

"""The library in one process, as on a laptop: the same code without peers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.exchange.flat.reducer import Reducer
from heterotrain.numerics.outlier_samples import RankSquares, estimate_by_rank
from heterotrain.session import Job
from heterotrain.state.tensors import flatten, unflatten
from heterotrain_core.scaling_rules import Statistics
from support.one_process import DATA, a_job

pytestmark = pytest.mark.usefixtures("own_process")


def train(job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> list[int]:
    """Train to the end and return the sizes of the steps."""
    sizes = []
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer, **options)
        sizes.append(step.batch_samples)
    return sizes


def test_steps_cover_each_epoch() -> None:
    """The last step of an epoch is smaller; nothing is padded or dropped."""
    assert train(*a_job()) == [8, 8, 4, 8, 8, 4]


def test_the_loop_equals_plain_sgd() -> None:
    """Plain torch with the same order of samples gives the same weights."""
    job, model, optimizer = a_job(epochs=1)
    torch.manual_seed(1)
    plain = torch.nn.Linear(2, 1).double()
    order: list[int] = []
    for step in job.steps(DATA):
        with step:
            order += step.task.ids
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in (0, 8, 16):
        x, y = DATA[order[start : start + 8]]
        stepper.zero_grad()
        ((plain(x) - y) ** 2).mean().backward()
        stepper.step()
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-12, atol=0)


def test_clipping_comes_after_the_reduction() -> None:
    """One step with a tiny limit moves the weights by the learning rate times the limit."""
    job, model, optimizer = a_job(epochs=1, batch_samples=20)
    before = [p.detach().clone() for p in model.parameters()]
    train(job, model, optimizer, clip_norm=1e-3)
    moved = math.sqrt(
        sum(float((p.detach() - b).square().sum()) for p, b in zip(model.parameters(), before, strict=True))
    )
    assert moved == pytest.approx(0.1 * 1e-3)


def test_schedulers_count_committed_steps() -> None:
    """Six steps, six halvings."""
    job, model, optimizer = a_job()
    job.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    train(job, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**6)


def schedules(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return a scheduler of each kind."""
    made = torch.optim.lr_scheduler
    parts = [made.ConstantLR(optimizer, 0.5, total_iters=1), made.ExponentialLR(optimizer, 0.9)]
    chained = made.ChainedScheduler([made.ExponentialLR(optimizer, 0.9)], optimizer)
    return [made.SequentialLR(optimizer, parts, [1]), chained, made.LambdaLR(optimizer, lambda step: 0.5**step)]


@pytest.mark.parametrize("kind", range(3))
def test_a_scheduler_that_the_job_does_not_know_is_refused(kind: int) -> None:
    """After a resume it would begin again. One that is registered is the script's to step."""
    job, model, optimizer = a_job()
    scheduler = schedules(optimizer)[kind]
    with pytest.raises(UsageError, match=r"SGD has a learning-rate scheduler .* pass it to job\.scheduler"):
        train(job, model, optimizer)
    job, model, optimizer = a_job()
    scheduler = schedules(optimizer)[kind]
    job.register("schedule", scheduler)
    job.on_epoch_end(lambda _epoch: scheduler.step())
    train(job, model, optimizer)


@pytest.mark.parametrize("kind", [0, 2])
def test_a_scheduler_that_is_stepped_twice_is_refused(kind: int) -> None:
    """By the job and by the script: the rate would change twice as fast."""
    job, model, optimizer = a_job()
    scheduler = job.scheduler(schedules(optimizer)[kind])
    done = []

    def loop() -> None:
        for step in job.steps(DATA):
            with step:
                for x, y in step.micro_batches():
                    step.backward(((model(x) - y) ** 2).mean())
                step.apply(optimizer)
            scheduler.step()
            done.append(step.number)

    with pytest.raises(UsageError, match=r"LR, which job\.scheduler steps as well"):
        loop()
    assert done == [0]


def test_hooks_run_once_for_each_epoch_without_gradients() -> None:
    """They run in eval mode, and the mode is restored."""
    job, model, optimizer = a_job(epochs=3)
    seen = []

    @job.on_epoch_end
    def hook(epoch: int) -> dict[str, float]:
        seen.append((epoch, torch.is_grad_enabled(), model.training))
        return {"samples": job.sum(n=sum(len(x) for x, _ in job.part(DATA, batch_samples=6)))["n"]}

    train(job, model, optimizer)
    assert seen == [(0, False, False), (1, False, False), (2, False, False)]
    assert model.training


def test_an_epoch_s_end_and_its_middle_are_named_by_the_same_count(caplog: pytest.LogCaptureFixture) -> None:
    """From 0: the epoch in progress, and the one whose hooks run."""
    job, model, optimizer = a_job(epochs=2, batch_samples=20)
    job.on_epoch_end(lambda epoch: {"ended": epoch})
    logger = logging.getLogger("heterotrain")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", logger="heterotrain"):
            job.report(begun=1)
            train(job, model, optimizer)
    finally:
        logger.removeHandler(caplog.handler)
    lines = [message for message in dict.fromkeys(caplog.messages) if message.startswith("epoch ")]
    assert lines == ["epoch 0: begun 1", "epoch 0 done (1 of 2): ended 0", "epoch 1 done (2 of 2): ended 1"]


def test_out_of_memory_halves_the_micro_batches() -> None:
    """The step is repeated with smaller micro-batches, and the weights are those of a run without errors."""
    job, model, optimizer = a_job()
    sizes = []
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                sizes.append(len(x))
                if len(x) > 3:
                    raise torch.OutOfMemoryError("too much")
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
    assert sizes[:6] == [8, 4, 2, 2, 2, 2]
    other = a_job()
    train(*other)
    torch.testing.assert_close(model.weight, other[1].weight, rtol=1e-12, atol=0)


def test_a_model_too_large_for_one_sample_is_an_error() -> None:
    """Halving ends at one sample."""
    job, _, _ = a_job()

    def loop() -> None:
        for step in job.steps(DATA):
            with step:
                for _ in step.micro_batches():
                    raise torch.OutOfMemoryError("too much")

    with pytest.raises(UsageError, match="a single sample does not fit"):
        loop()


def test_buffers_and_random_numbers_are_restored_when_a_step_is_repeated() -> None:
    """A failed attempt's changes of buffers are undone, and its random numbers are drawn again."""
    job = heterotrain.init(epochs=1, batch_samples=20)

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1).double()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.nn.functional.linear(x, self.layer.weight, self.layer.bias)

    model = job.wrap(Counting())
    job.buffers("calls", "own")
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    drawn = []
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            drawn.append(float(torch.rand(())))
            if len(drawn) == 1:
                raise torch.OutOfMemoryError("once")
            step.apply(optimizer)
    assert drawn[0] == drawn[1]
    assert int(model.calls) == 2  # the repeated attempt's two micro-batches


MISTAKES = {
    "no apply": r"step 0 ended without step\.apply", "apply early": r"after 0 of 1 micro-batch\.",
    "apply twice": r"step\.apply once", "backward twice": r"call 2 of step\.backward\. Call .* exactly once",
    "vector loss": r"scalar loss", "clip at 0": r"clip_norm must be above 0, not 0",
    "weight": r"of at least 0, not nan",
    "other optimizer": r"a SGD that is unknown to job\.optimizer", "no optimizer": r"needs at least one optimizer",
    "detached loss": r"depends on no parameter",
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_loop_are_reported(mistake: str) -> None:
    """Each message names the remedy."""
    job, model, optimizer = a_job()
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for step in job.steps(DATA):
            with step:
                if mistake == "apply early":
                    step.apply(optimizer)
                for x, y in step.micro_batches():
                    errors = (model(x) - y) ** 2
                    weight = float("nan") if mistake == "weight" else None
                    loss = errors if mistake == "vector loss" else errors.mean()
                    step.backward(loss.detach() if mistake == "detached loss" else loss, weight)
                    if mistake == "backward twice":
                        step.backward(errors.mean())
                if mistake != "no apply":
                    limit = 0.0 if mistake == "clip at 0" else None
                    given = {"other optimizer": (other,), "no optimizer": ()}.get(mistake, (optimizer,))
                    step.apply(*given, clip_norm=limit)
                if mistake == "apply twice":
                    step.apply(optimizer)

    with pytest.raises(UsageError, match=MISTAKES[mistake]):
        loop()


def test_a_step_outside_its_with_block_is_reported() -> None:
    """The script has to enter the transaction."""
    job, _, _ = a_job()
    with pytest.raises(UsageError, match="with step"):
        for _ in job.steps(DATA):
            pass


def test_micro_batches_outside_the_with_block_are_reported() -> None:
    """Without the block, ranks could not commit the step together."""
    job, _, _ = a_job()
    with pytest.raises(UsageError, match="inside `with step:`"):
        next(iter(next(iter(job.steps(DATA))).micro_batches()))


def test_a_default_group_of_the_script_is_reported() -> None:
    """There can be only one default group; the message comes before ranks connect."""
    job, _, _ = a_job()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="leave out init_process_group"):
            next(iter(job.steps(DATA)))
    finally:
        torch.distributed.destroy_process_group()


def test_several_optimizers_share_a_step() -> None:
    """Each one moves its own parameters by the same gradient; schedules count the step once."""
    job, model, _ = a_job(epochs=1, batch_samples=20)
    job._training.optimizers.clear()
    one, other = (job.optimizer(torch.optim.SGD([p], lr=rate)) for p, rate in ((model.weight, 0.1), (model.bias, 0.2)))
    job.scheduler(torch.optim.lr_scheduler.ExponentialLR(one, 0.5))
    twin = torch.nn.Linear(2, 1).double()
    twin.load_state_dict(model.state_dict())
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(one, other)
    x, y = DATA.tensors
    ((twin(x) - y) ** 2).mean().backward()
    for ours, plain, rate in ((model.weight, twin.weight, 0.1), (model.bias, twin.bias, 0.2)):
        assert plain.grad is not None
        torch.testing.assert_close(ours, plain - rate * plain.grad, rtol=1e-12, atol=0)
    assert one.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_registered_object_needs_a_state_and_a_unique_name() -> None:
    """Otherwise it would be missing in a checkpoint, or replace another object."""
    job, _, optimizer = a_job()
    with pytest.raises(UsageError, match=r"state_dict\(\) and load_state_dict\(\), not a int"):
        job.register("number", 5)  # type: ignore[type-var]  # the mistake
    job.register("mine", optimizer)
    with pytest.raises(UsageError, match="already has an object named 'mine'"):
        job.register("mine", optimizer)


def test_a_loss_scaler_of_the_script_is_refused() -> None:
    """It would fail on a rank without samples; a disabled one does nothing."""
    job, _, _ = a_job()
    with pytest.raises(UsageError, match="precision fp16"):
        job.register("scaler", torch.amp.GradScaler("cpu"))
    job.register("scaler", torch.amp.GradScaler("cpu", enabled=False))


def test_unknown_layers_that_mix_samples_are_refused_by_name() -> None:
    """A layer that cannot count over the global batch is refused, with a remedy."""
    job = heterotrain.init()
    with pytest.raises(UsageError, match=r"'1' is a SyncBatchNorm.*GroupNorm"):
        job.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)))


@pytest.mark.parametrize(
    "setting", [{"precision": "fp8"}, {"compression": "gzip"}, {"on_non_finite": "stop"}, {"on_divergence": "merge"}]
)
def test_unknown_settings_are_refused(setting: dict[str, str]) -> None:
    """The message lists the known ones."""
    with pytest.raises(UsageError, match=r"is unknown: choose one of .*(FP16|Ignore|Resync)"):
        heterotrain.init(**setting)  # type: ignore[arg-type]  # one of these keywords


def test_elements_are_clipped_after_the_norm() -> None:
    """No element moves by more than the learning rate times the limit."""
    job, model, optimizer = a_job(epochs=1, batch_samples=20)
    before = [p.detach().clone() for p in model.parameters()]
    train(job, model, optimizer, clip_norm=100.0, clip_value=1e-3)
    moved = [float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True)]
    assert max(moved) == pytest.approx(0.1 * 1e-3)


def test_numeric_state_survives_a_checkpoint() -> None:
    """Loss scale, rate and noise averages are restored from plain values."""
    job, model, optimizer = a_job(epochs=3)
    train(job, model, optimizer)
    kept = job._training.extras["heterotrain-numerics"].state_dict()
    assert kept["rate"]["worth_steps"] == 9.0
    other, *_ = a_job()
    fresh = other._training.extras["heterotrain-numerics"]
    assert fresh.state_dict() != kept
    fresh.load_state_dict(unflatten(flatten(kept)))
    assert fresh.state_dict() == kept


def outlier_steps(shares: tuple[int, ...], steps: int) -> Iterator[tuple[list[RankSquares], float]]:
    """Yield each rank's squares and the squared norm of the step; one sample in a hundred is ten times as long."""
    generator = torch.Generator().manual_seed(3)
    dimensions, batch = 20, sum(shares)
    for _ in range(steps):
        means = []
        for share in shares:
            long = torch.rand(share, 1, generator=generator) < 0.01
            noise = torch.randn(share, dimensions, generator=generator, dtype=torch.float64)
            means.append(0.2 + (noise * torch.where(long, 10.0, 1.0)).mean(0))
        total = sum(mean * (share / batch) for mean, share in zip(means, shares, strict=True))
        ranks = [
            RankSquares(weighted=share * float(mean.square().sum()), groups=1, samples=share)
            for mean, share in zip(means, shares, strict=True)
        ]
        yield ranks, float(torch.as_tensor(total).square().sum())


def test_outlier_samples_are_learned_and_survive_a_checkpoint() -> None:
    """Later estimates deviate less; a copy goes on alike."""
    shares = (2, 4, 60)
    job, *_ = a_job()
    numerics = job._training.extras["heterotrain-numerics"]
    ours, closed = [], []
    for ranks, total in outlier_steps(shares, 400):
        known = numerics.noise[Statistics.PLAIN]
        numerics.measured(Statistics.PLAIN, ranks, total_squared=total)
        average, plain = numerics.noise[Statistics.PLAIN], estimate_by_rank(ranks, total_squared=total)
        assert plain is not None
        ours.append(average.variance - 0.999 ** (sum(shares) / 8) * known.variance)
        closed.append((1 - 0.999 ** (sum(shares) / 8)) * plain.variance)
    spread = [torch.tensor(values[200:]).std().item() for values in (ours, closed)]
    assert spread[0] < 0.6 * spread[1]
    kept = numerics.state_dict()
    assert numerics.kurtosis[Statistics.PLAIN].samples() > sum(shares)
    assert numerics.kurtosis[Statistics.PRECONDITIONED].samples() == 0
    other, *_ = a_job()
    fresh = other._training.extras["heterotrain-numerics"]
    fresh.load_state_dict(unflatten(flatten(kept)))
    for each in (numerics, fresh):
        each.measured(Statistics.PLAIN, ranks, total_squared=total)
    assert fresh.state_dict() == numerics.state_dict()


def test_nothing_to_train() -> None:
    """There is no model, no data, no trainable parameter, or a number makes no sense."""
    for settings, said in (
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"batch_samples": -3}, "not -3"),
    ):
        with pytest.raises(UsageError, match=said):
            heterotrain.init(**settings)
    job = heterotrain.init()
    with pytest.raises(UsageError, match=r"job\.wrap"):
        next(iter(job.steps(DATA)))
    job, _, _ = a_job()
    with pytest.raises(UsageError, match="empty"):
        next(iter(job.steps(torch.utils.data.TensorDataset(torch.empty(0, 2)))))
    frozen = torch.nn.Linear(2, 1)
    frozen.requires_grad_(requires_grad=False)
    with pytest.raises(UsageError, match="requires a gradient"):
        Reducer(frozen, bucket_bytes=100).begin()


def test_parameters_may_be_frozen() -> None:
    """The buckets follow; a frozen parameter keeps its value."""
    job, model, optimizer = a_job(epochs=1)
    bias = model.bias.detach().clone()
    model.bias.requires_grad = False
    train(job, model, optimizer)
    assert torch.equal(model.bias, bias)


def test_a_gradient_that_arrives_twice_is_an_error() -> None:
    """Reentrant checkpointing would start a reduction too early."""
    job = heterotrain.init(epochs=1, batch_samples=8)
    layer = torch.nn.Linear(2, 2).double()
    model = job.wrap(layer)
    job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def twice(x: torch.Tensor) -> torch.Tensor:
        inner = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=True)
        return torch.utils.checkpoint.checkpoint(layer, inner, use_reentrant=True)  # type: ignore[no-any-return]  # torch's is untyped

    def loop() -> None:
        for step in job.steps(DATA):
            with step:
                for x, _ in step.micro_batches():
                    step.backward(twice(x).mean())

    with pytest.raises(UsageError, match="use_reentrant=False"):
        loop()


def test_finish_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    """The current step is the last one."""
    job, model, optimizer = a_job(epochs=50)
    count = 0
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
        count += 1
        if count == 4:
            job.finish("good enough")
    assert count == 4


def test_fit_steps_a_scheduler() -> None:
    """It is stepped once for each committed step: two epochs of three steps halve the rate six times."""
    made: list[torch.optim.lr_scheduler.LRScheduler] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        made.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return made[0]

    heterotrain.fit(
        torch.nn.Linear(2, 1).double(), DATA, loss=lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), scheduler=scheduler,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.64), epochs=2, batch_samples=8,
    )  # fmt: skip
    assert made[0].get_last_lr() == [0.01]


def test_fit_refuses_an_optimizer_in_place_of_a_function() -> None:
    """The model may still move to another device, so the optimizer has to be made later."""
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"optimizer=lambda p: torch\.optim\.SGD"):
        heterotrain.fit(
            model, DATA, loss=lambda _m, _b: model.weight.sum(), optimizer=torch.optim.SGD(model.parameters())
        )  # type: ignore[arg-type]  # the mistake


def test_fit_trains_without_a_loop() -> None:
    """``fit`` gives the weights of the hand-written loop, also for a loss that is a sum with a weight."""
    by_hand = a_job()
    train(*by_hand)
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1).double()
    heterotrain.fit(
        model, DATA, loss=lambda m, b: (((m(b[0]) - b[1]) ** 2).sum(), float(len(b[0]))),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), epochs=2, batch_samples=8,
    )  # fmt: skip
    torch.testing.assert_close(model.weight, by_hand[1].weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize("spelling", ["bf16", "BF16", "Bf16"])
def test_settings_are_read_in_any_case(spelling: str) -> None:
    """The API's spelling as well as torch's."""
    heterotrain.init(precision=spelling, compression=spelling)

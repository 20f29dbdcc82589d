"""Members whose ranks divide parameters, gradients and optimizer state: ``torch.distributed.fsdp.fully_shard``.

Every rank computes all units on its own samples. Before a unit runs, the ranks of the member gather its parameters;
after its backward pass, each rank keeps the sum of its own part of the gradient over the member. So for the exchange
between members a rank's gradient is a sum over samples, as with whole models.

Some parameters stay whole on every rank, because ``fully_shard`` cannot divide them: numbers without a dimension, and
parameters of another format than the rest of their unit. Their gradients are summed like those of whole models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from heterotrain.errors import UsageError
from heterotrain.network.gloo.default_group import outlive
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.memory import return_large_blocks
from heterotrain.parts.sharded.sharded_model import SETTING, watch_uses
from heterotrain.parts.units.wrappers import DEFAULT, WrapOptions, prepare_units
from heterotrain.state.local import is_divided, local, range_of

NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")
"""Whether torch has the names of 2.15 for methods of its process groups."""
ALL_GATHER = "all_gather_single" if NEW_NAMES else "_allgather_base"
REDUCE_SCATTER = "reduce_scatter_single" if NEW_NAMES else "_reduce_scatter_base"


def mesh_of(group: MemberGroup, device_type: str) -> Any:
    """Return torch's ``DeviceMesh`` over the ranks of the member; nothing is exchanged.

    Args:
        group: the member's group; it need not be connected.
        device_type: ``cpu`` or ``cuda``.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  # takes seconds to load

    outlive(group)  # torch finds it by its name
    # DeviceMesh.from_group numbers ranks by torch's default group, which another formation would replace.
    mesh = DeviceMesh(device_type, torch.arange(group.size()), _init_backend=False, _rank=group.rank())
    mesh._dim_group_names = [group.group_name]  # noqa: SLF001  # as from_group does
    if hasattr(mesh, "_pg_registry"):  # torch 2.15; for compiled functions
        mesh._pg_registry[group.group_name] = group  # noqa: SLF001  # as above
    return mesh


def shard(
    model: torch.nn.Module,
    group: MemberGroup,
    units: Sequence[torch.nn.Module],
    *,
    device: torch.device,
    options: WrapOptions = DEFAULT,
    gather_dtype: torch.dtype | None = None,
    fill: Callable[[torch.nn.Module | None], None] = lambda _unit: None,
) -> torch.nn.Module:
    """Divide a model among the ranks of a member; the model stays the same object, its parameters become new ones.

    Every rank has the same whole model and keeps its own part, moved to its device. Nothing is exchanged. A unit that
    shares a parameter with another layer is gathered together with the rest of the model, at the model's start.

    Args:
        model: with its weights, or on the meta device.
        group: the member's ranks.
        units: the layers that are gathered one at a time, none inside another.
        device: of this rank.
        options: of ``job.wrap``.
        gather_dtype: format of gathered parameters; ``None`` for their own, in which gradients are always summed.
        fill: gives a unit on the meta device its values, right before it is divided; ``None`` stands for all that is
            still without values. So no rank ever holds more than one whole unit and what is around the units.

    Raises:
        UsageError: torch cannot divide this model.
    """
    prepare_units(units, options)
    if group.size() == 1:
        return model if any(p.is_meta for p in model.parameters()) else model.to(device)
    from torch.distributed.fsdp import (  # noqa: PLC0415  # takes seconds to load
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    if device.type == "cpu" or options.offload:
        return_large_blocks()
    settings: dict[str, Any] = {
        "mesh": mesh_of(group, device.type),
        "mp_policy": MixedPrecisionPolicy(param_dtype=gather_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.offload else OffloadPolicy(),
    }
    try:
        for unit in _separate(model, units):
            fill(unit)
            whole = _kept_whole(model)
            fully_shard(unit, reshard_after_forward=not options.keep_gathered, ignored_params=whole, **settings)
        fill(None)
        whole = _kept_whole(model)
        for parameter in whole:
            parameter.data = parameter.data.to(device) if not parameter.is_meta else parameter.data
        fully_shard(model, reshard_after_forward=False, ignored_params=whole, **settings)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise UsageError(f"torch cannot divide this model among the ranks of a worker: {error}") from error
    _use_member(model, group)
    _check_ranges(model)
    return model


def _use_member(model: torch.nn.Module, group: MemberGroup) -> None:
    """Let a divided model gather parameters and add up gradients, without dividing them, over the member's group."""
    for layer in _divided_layers(model):
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_custom_all_gather(_AllGather(group))
        layer.set_custom_reduce_scatter(_ReduceScatter(group))


def uses_of(model: torch.nn.Module) -> set[str] | None:
    """Let ranks of a member use different parameters; call it right after ``shard``.

    Returns:
        Names of those that this rank uses (``watch_uses``); ``None`` with versions of PyTorch before 2.15, where all
        ranks have to use the same parameters in each pass.
    """
    layers = _divided_layers(model)
    if not hasattr(model, SETTING):
        return None
    for layer in layers:
        getattr(layer, SETTING)(True, recurse=False)
    return watch_uses(model, layers)


class _Collective:
    """A collective of FSDP on the member's group.

    FSDP's own ones go through functions of ``torch.distributed``. When a collective fails, those look for the group
    among the default group's relatives, and raise an error about that in place of the real one.
    """

    def __init__(self, group: MemberGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, method: str, arguments: tuple[Any, ...], *, async_op: bool) -> dist.Work | None:
        work = self._group.collective(method, arguments, {})
        if async_op:
            return work
        work.wait()  # on an accelerator, the current stream waits
        return None


class _AllGather(_Collective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,  # noqa: ARG002  # the member's, by its name
        async_op: bool = False,  # noqa: FBT001, FBT002  # FSDP's signature
    ) -> dist.Work | None:
        """Join the ranks' inputs of the same size."""
        return self._run(ALL_GATHER, (output_tensor, input_tensor, AllgatherOptions()), async_op=async_op)


class _ReduceScatter(_Collective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,  # noqa: ARG002  # as above
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002  # as above
    ) -> dist.Work | None:
        """Add up the ranks' inputs; each rank keeps its part of the sum."""
        options = ReduceScatterOptions()
        options.reduceOp = op
        return self._run(REDUCE_SCATTER, (output_tensor, input_tensor, options), async_op=async_op)


def forget_pass(model: torch.nn.Module) -> None:
    """Leave a forward or backward pass that was interrupted at any point; the next one starts from nothing.

    Parameters keep their values. Call it when the member's connections are cut, so that nothing waits for them.
    """
    if not any(_divided_layers(model)):
        return
    root: Any = model
    if root._get_fsdp_state()._is_root is None:  # noqa: SLF001  # no pass has begun yet
        return
    if hasattr(root, "reset_iter_state"):  # torch 2.15
        root.reset_iter_state()
        return
    _forget_pass_2_10(root)


def _forget_pass_2_10(root: Any) -> None:
    """Do what torch 2.15 does in ``FSDPModule.reset_iter_state``, which earlier versions lack."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # noqa: PLC0415  # as above

    top = root._get_fsdp_state()  # noqa: SLF001  # torch 2.10 has no public way
    top._comm_ctx.all_gather_state = top._comm_ctx.reduce_scatter_state = None  # noqa: SLF001  # FSDP has no public call for it
    top._comm_ctx.post_forward_order.clear()  # noqa: SLF001  # FSDP has no public call for it
    for state in top._state_ctx.all_states:  # noqa: SLF001  # FSDP has no public call for it
        state._modules_to_run_forward.clear()  # noqa: SLF001  # FSDP has no public call for it
        state._training_state = TrainingState.IDLE  # noqa: SLF001  # FSDP has no public call for it
        layers = state._fsdp_param_group  # noqa: SLF001  # FSDP has no public call for it
        if layers is None:
            continue
        layers._all_gather_result = layers._post_reduce_event = layers._all_reduce_state = None  # noqa: SLF001  # FSDP has no public call for it
        layers._reshard_after_forward_event = layers._partial_reduce_output = None  # noqa: SLF001  # FSDP has no public call for it
        layers._post_forward_indices.clear()  # noqa: SLF001  # FSDP has no public call for it
        for parameter in layers.fsdp_params:
            parameter.sharded_param.grad = parameter.unsharded_accumulated_grad = None
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None:
                gathered.grad = None
        layers._training_state = TrainingState.IDLE  # noqa: SLF001  # FSDP has no public call for it
        layers._to_sharded()  # noqa: SLF001  # FSDP has no public call for it
    top._state_ctx.iter_forward_root = None  # noqa: SLF001  # FSDP has no public call for it
    top._state_ctx.post_backward_final_callback_queued = False  # noqa: SLF001  # FSDP has no public call for it


def _divided_layers(model: torch.nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if hasattr(layer, "set_force_sum_reduction_for_comms")]


def _separate(model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the units that share no parameter with other layers; torch gathers tied parameters in one place only."""
    units = [unit for unit in units if any(True for _ in unit.parameters())]
    inside = [{id(p) for p in unit.parameters()} for unit in units]
    layers = [{id(layer) for layer in unit.modules()} for unit in units]
    uses = Counter(key for parameters in inside for key in parameters)
    unit_layers = set().union(*layers) if layers else set()
    for layer in model.modules():
        if id(layer) not in unit_layers:
            uses.update({id(p) for p in layer.parameters(recurse=False)})
    return [unit for unit, parameters in zip(units, inside, strict=True) if all(uses[key] == 1 for key in parameters)]


def _kept_whole(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the parameters that stay whole on every rank; see the module's docstring."""
    parameters = list(model.parameters())
    formats = Counter[torch.dtype]()
    for parameter in parameters:
        formats[parameter.dtype] += parameter.numel()
    common = formats.most_common(1)[0][0] if formats else torch.float32
    return {p for p in parameters if p.dim() == 0 or p.dtype != common}


def _check_ranges(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_divided(parameter) and range_of(name, parameter).elements != local(parameter).numel():
            raise UsageError(f"torch has divided parameter {name!r} in an unknown way: use PyTorch 2.10 to 2.15")

"""Devices that the trainer cannot use are refused: training on the CPU next to them would be silent."""

from __future__ import annotations

import pytest
from heterotrain_operator.decide.objects.pods import problem_of_templates
from support.fake_cluster import Body, FakeCluster, pool


def accepted(limits: Body, **spec: object) -> str:
    """Return what is wrong with the template of a job with these limits; empty for nothing."""
    view = FakeCluster(pool("a", resources={"limits": limits}), spec=spec or None).job_view
    assert view.spec is not None
    return problem_of_templates(view.template, view.spec, view.patches)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("google.com/tpu", "TPUs"),
        ("cloud-tpus.google.com/v3", "TPUs"),
        ("aws.amazon.com/neuroncore", "Trainium"),
        ("aws.amazon.com/neuron", "Trainium"),
        ("habana.ai/gaudi", "Gaudi"),
        ("gpu.intel.com/xe", "Intel"),
        ("huawei.com/Ascend910", "Ascend"),
    ],
)
def test_a_device_that_the_library_does_not_use_is_refused(name: str, kind: str) -> None:
    problem = accepted({name: "4"})
    assert f"a worker of pool a requests {name}, but the library trains on" in problem
    assert kind in problem
    assert not accepted({name: "0"})
    assert not accepted({name: "4"}, runtime="Torchrun"), "such a script chooses its device itself"


@pytest.mark.parametrize(
    "limits",
    [{"nvidia.com/gpu": "8"}, {"amd.com/gpu": "2"}, {"nvidia.com/mig-1g.5gb": "1"}, {"vpc.amazonaws.com/efa": "4"}, {}],
)
def test_devices_that_it_uses_are_accepted(limits: Body) -> None:
    assert not accepted(limits)


@pytest.mark.parametrize(
    "limits", [{"nvidia.com/mig-1g.5gb": "2"}, {"nvidia.com/mig-1g.5gb": "1", "nvidia.com/mig-2g.10gb": "1"}]
)
def test_several_slices_of_a_gpu_in_a_worker_are_refused(limits: Body) -> None:
    assert "2 MIG slices, but CUDA shows each process only one" in accepted(limits)

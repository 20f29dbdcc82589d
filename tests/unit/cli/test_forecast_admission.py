"""The forecast refuses in one sentence what the API server refuses; tests/integration asks a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from heterotrain_cli.errors import InputError
from heterotrain_cli.forecast.job import read_job
from heterotrain_cli.job_file import read_job_file
from heterotrain_operator.api.reading import SpecError, read_spec
from heterotrain_operator.api.schema import Model, SpecRule
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from support.job_table import ACCEPTED, GOOD, REFUSED, job, torchrun, training


def read(folder: Path, body: dict[str, Any]) -> object:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return read_job_file(str(path))


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_good_job_is_accepted(tmp_path: Path, case: str) -> None:
    read(tmp_path, job(ACCEPTED[case]))


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_job_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    change, sentence = REFUSED[case]
    with pytest.raises(InputError) as error:
        read(tmp_path, job(change))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert "Value error" not in str(error.value)


def test_a_job_whose_batch_only_the_script_has_is_not_forecast(tmp_path: Path) -> None:
    """The forecast divides a batch by speed, and such a job does neither."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job(torchrun())), encoding="utf-8")
    with pytest.raises(InputError, match="the batch of a job with runtime: Torchrun is in its script"):
        read_job(str(path))


def test_a_whole_number_with_a_point_is_one_as_kubectl_sends_it(tmp_path: Path) -> None:
    read(tmp_path, job(training(globalBatchSize=448.0)))


def test_a_long_value_is_quoted_in_part(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, job(training(globalBatchSize="4" * 10_000)))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (training(globalBatchSize="many"), 'spec.training.globalBatchSize must be a whole number, not "many"'),
        (training(globalBatchSize=0), "spec.training.globalBatchSize is 0, but must be at least 1"),
        (lambda body: body["spec"].pop("template"), "spec.template is missing"),
        (lambda body: body["spec"]["workerPools"][1].pop("name"), "spec.workerPools[1].name is missing"),
    ],
)
def test_the_operator_reports_a_stored_mistake_in_the_same_words(change: Any, sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        read_spec(job(change))
    assert str(error.value).startswith(sentence)


def rules_of(model: type[Model]) -> Iterator[SpecRule]:
    yield from model.rules
    for field in model.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            for inner in (part, *get_args(part)):
                if isinstance(inner, type) and issubclass(inner, Model):
                    yield from rules_of(inner)


def test_every_rule_for_new_objects_has_a_twin_in_python() -> None:
    rules = {rule.cel: rule for rule in rules_of(HeteroTrainJobSpec)}
    assert len(rules) > 15
    assert [r.cel for r in rules.values() if not (r.holds or r.admits) and "oldSelf" not in r.cel] == []


def test_the_table_starts_from_a_job_that_says_little() -> None:
    assert read_spec(GOOD).training.global_batch_size == 448

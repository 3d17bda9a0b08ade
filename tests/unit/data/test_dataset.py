from __future__ import annotations

import dataclasses

import pytest
import torch

from stobatch.data import Dataset, DatasetInfo, Examples, from_tensors


def images(count: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 1, count * 12).view(count, 3, 2, 2)


def labels(count: int = 4) -> torch.Tensor:
    return torch.arange(count) % 2


def test_examples_take_limit_and_len() -> None:
    examples = Examples(images(), labels(), 2)
    assert len(examples) == 4
    assert torch.equal(examples.take(torch.tensor([3, 1])).inputs, images()[[3, 1]])
    assert len(examples.take(torch.tensor([], dtype=torch.int64))) == 0
    assert len(examples.limit(3)) == 3
    assert len(examples.limit(99)) == 4
    assert examples.limit(None) is examples


def test_examples_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Examples(images(), labels(), 2).num_classes = 3  # type: ignore[misc]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_name_the_first_example(value: float, fails) -> None:
    broken = images()
    broken[2, 0, 1, 1] = broken[3, 0, 0, 0] = value
    assert "example 2 " in fails(Examples, broken, labels(), 2)


@pytest.mark.parametrize("value", [1.001, -1.001, 300.0])
def test_values_out_of_range_name_the_first_example(value: float, fails) -> None:
    broken = images()
    broken[1, 2, 0, 0] = broken[3, 0, 0, 0] = value
    message = fails(Examples, broken, labels(), 2)
    assert "example 1 leaves [-1, 1]" in message
    assert "Rescale or clip" in message


def test_byte_values_say_how_to_scale(fails) -> None:
    as_floats = torch.arange(48.0).view(4, 3, 2, 2)
    assert "Divide by 127.5 and subtract 1." in fails(from_tensors, as_floats, labels(), as_floats, labels())
    as_bytes = as_floats.to(torch.uint8)
    assert "Divide by 127.5 and subtract 1." in fails(from_tensors, as_bytes, labels(), as_bytes, labels())


@pytest.mark.parametrize("wrong", [-1, 2])
def test_labels_out_of_range_name_the_first_example(wrong: int, fails) -> None:
    bad = labels()
    bad[3] = wrong
    assert f"example 3 has label {wrong}." in fails(Examples, images(), bad, 2)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (images().double(), labels()),
        (images().long(), labels()),
        (images(), labels().int()),
        (images(), labels().float()),
        (images(), labels(3)),
        (images()[0], labels(3)),
        (images(), labels().view(4, 1)),
    ],
)
def test_wrong_form_is_refused(inputs: torch.Tensor, targets: torch.Tensor, fails) -> None:
    fails(Examples, inputs, targets, 2)


def test_from_tensors_describes_what_it_got() -> None:
    data = from_tensors(images(6).double(), labels(6).int(), images(), labels(), num_classes=5, name="mine")
    assert data.info == DatasetInfo("mine", (3, 2, 2), 5, 6, 4, ("0", "1", "2", "3", "4"), 1)
    assert data.train.inputs.dtype == torch.float32
    assert data.test.labels.dtype == torch.int64


def test_from_tensors_takes_the_unit_range_and_infers_classes() -> None:
    data = from_tensors(images().add(1).div(2), torch.tensor([0, 1, 2, 0]), images(), labels())
    assert data.info.num_classes == data.test.num_classes == 3


def test_empty_and_undescribed_parts_are_refused(fails) -> None:
    assert "no test examples" in fails(from_tensors, images(), labels(), images()[:0], labels()[:0])
    assert "not what was described" in fails(from_tensors, images(), labels(), torch.zeros(4, 1, 2, 2), labels())
    good = from_tensors(images(), labels(), images(), labels())
    fails(Dataset, dataclasses.replace(good.info, num_train=5), good.train, good.test)

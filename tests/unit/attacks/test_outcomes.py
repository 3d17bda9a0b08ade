"""What must not change an attack's outcome: stopping early, neighbours in the batch, chunks, modes, and other seeds."""

from __future__ import annotations

import threading

import pytest
import torch
from oracles import NORMS, ROUNDING, ball, digits, excess, rows, seeded
from torch import Tensor, nn

from stobatch.attacks import ATTACKS, FGSM, IFGSM, MIM, Ball, Budget, Goal, Plain
from stobatch.attacks.loop import map_chunks
from stobatch.errors import ModelError
from stobatch.types import Norm

BUDGET = Budget(steps=8, queries=30, restarts=2)
DETERMINISTIC = ["fgsm", "ifgsm", "mim"]
RANDOM = sorted(set(ATTACKS) - set(DETERMINISTIC))

every_norm = pytest.mark.parametrize("norm", NORMS)
every_attack = pytest.mark.parametrize("name", sorted(ATTACKS))


def model(*, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)
    layers[1].weight.data.mul_(3)
    return layers


def case(norm: Norm, *, count: int = 24, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Ball, Goal]:
    """About half of the examples can be made to leave their label."""
    share = {Norm.LINF: 0.12, Norm.L2: 0.1, Norm.L1: 0.05}[norm]
    network, around = model(dtype=dtype), ball(digits(count, dtype=dtype), norm, share)
    return network, around, Goal(network(around.centre).argmax(1))


def left(network: nn.Module, points: Tensor, goal: Goal) -> Tensor:
    return network(points).argmax(1) != goal.labels


@every_norm
@every_attack
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_point_is_in_the_ball_and_in_the_range(name: str, norm: Norm, dtype: torch.dtype) -> None:
    """In double precision, without any tolerance, for radii from one that rounding swallows to the whole range."""
    network, centre = model(dtype=dtype), digits(4, dtype=dtype)
    for share in (0.0, 1e-6, 0.1, 1.0):
        around = ball(centre, norm, share)
        found = ATTACKS[name](Budget(steps=3, queries=8)).run(Plain(network), around, Goal(torch.arange(4)), seeded())
        assert excess(around, found) <= ROUNDING
        assert found.dtype == dtype


@every_norm
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_batch_is_its_examples_one_by_one(name: str, norm: Norm) -> None:
    network, around, goal = case(norm)
    attack = ATTACKS[name](BUDGET)
    together = attack.run(Plain(network), around, goal, seeded())
    gone = left(network, together, goal)
    assert bool(gone.any())
    assert not bool(gone.all())
    for row in range(0, 24, 2):
        part = slice(row, row + 1)
        alone = attack.run(Plain(network), around.part(part), goal.part(part), seeded())
        assert torch.allclose(together[part], alone, rtol=0, atol=1e-9)


@every_norm
def test_a_label_once_left_stays_left(norm: Norm) -> None:
    """By hand: wherever one of the visited points leaves the label, the returned point does."""
    network, around, goal = case(norm)
    attack = IFGSM(12)
    now, ever = around.centre, torch.zeros(24, dtype=torch.bool)
    for _ in range(12):
        leaf = now.clone().requires_grad_()
        nn.functional.cross_entropy(network(leaf), goal.labels, reduction="sum").backward()
        now = around.ascend(now, leaf.grad, attack.step_size(around))
        ever |= left(network, now, goal)
    assert torch.equal(left(network, attack.run(Plain(network), around, goal, seeded()), goal), ever)
    assert 0 < int(ever.sum()) < 24, "a test of nothing"


@every_norm
@every_attack
def test_chunks_do_not_change_the_points(name: str, norm: Norm) -> None:
    network, around, goal = case(norm, count=12)
    attack = ATTACKS[name](Budget(steps=7, queries=20))
    whole = attack.run(Plain(network), around, goal, seeded())
    for chunk in (1, 5):
        again = attack.run(Plain(network), around, goal, seeded(), chunk=chunk)
        assert torch.allclose(again, whole, rtol=0, atol=1e-9)


class Watched(nn.Sequential):
    """Somebody's own layers: passes must come one at a time."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__(layers)
        self.seen: set[int] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.add(threading.get_ident())
        return super().forward(inputs)


@every_norm
@every_attack
def test_threads_do_not_change_the_points(name: str, norm: Norm) -> None:
    """Layers that keep nothing are asked by several threads at once, and somebody's own code by one alone."""
    network, around, goal = case(norm, count=230)
    attack, watched, threads = ATTACKS[name](Budget(steps=3, queries=5)), Watched(network), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = attack.run(Plain(network), around, goal, seeded(), chunk=220)
        alone = attack.run(Plain(watched), around, goal, seeded(), chunk=220)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert watched.seen == {threading.get_ident()}
    assert torch.allclose(together, alone, rtol=0, atol=1e-9)


def test_what_goes_wrong_in_a_thread_is_raised() -> None:
    def work(piece: slice) -> Tensor:
        if piece.start:
            raise ModelError("found in a later piece.", remedy="None.")
        return torch.zeros(piece.stop)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(ModelError, match="later piece"):
            map_chunks(work, torch.zeros(500), 220, concurrent=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@every_norm
@every_attack
def test_the_generator_decides_and_nothing_else_does(name: str, norm: Norm) -> None:
    network, around, goal = case(norm)
    attack = ATTACKS[name](BUDGET)
    torch.manual_seed(1)
    first = attack.run(Plain(network), around, goal, seeded(5))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(attack.run(Plain(network), around, goal, seeded(5)), first)
    assert torch.equal(torch.get_rng_state(), before)
    other = attack.run(Plain(network), around, goal, seeded(6))
    assert torch.equal(other, first) == (name in DETERMINISTIC)


@every_attack
@pytest.mark.parametrize("start", [None, 3.0])
def test_the_models_own_gradients_and_the_inputs_are_untouched(name: str, start: float | None) -> None:
    network, around, goal = case(Norm.L2)
    for parameter in network.parameters():
        parameter.grad = None if start is None else torch.full_like(parameter, start)
    inputs, labels = around.centre.clone(), goal.labels.clone()
    ATTACKS[name](BUDGET).run(Plain(network), around, goal, seeded())
    assert torch.equal(around.centre, inputs)
    assert torch.equal(goal.labels, labels)
    for parameter in network.parameters():
        untouched = parameter.grad is None if start is None else bool((parameter.grad == start).all())
        assert untouched


@every_attack
def test_attacks_work_where_gradients_are_switched_off(name: str) -> None:
    network, around, goal = case(Norm.LINF)
    attack = ATTACKS[name](BUDGET)
    on = attack.run(Plain(network), around, goal, seeded())
    with torch.no_grad():
        assert torch.equal(attack.run(Plain(network.requires_grad_(False)), around, goal, seeded()), on)


@every_attack
def test_inputs_that_ask_for_gradients_give_points_that_do_not(name: str) -> None:
    """Otherwise every step would lengthen one graph, and two thousand of them would fill the memory."""
    network, around, goal = case(Norm.L2)
    attack = ATTACKS[name](BUDGET)
    asking = Ball.around(around.centre.clone().requires_grad_(), around.radius)
    found = attack.run(Plain(network), asking, goal, seeded())
    assert not found.requires_grad
    assert torch.equal(found, attack.run(Plain(network), around, goal, seeded()))


@every_norm
@every_attack
def test_a_model_of_higher_precision_than_its_inputs_can_be_attacked(name: str, norm: Norm) -> None:
    network, around, goal = case(norm, dtype=torch.float32)
    double = model()
    attack = ATTACKS[name](BUDGET)
    found = attack.run(Plain(lambda x: double(x.double())), around, goal, seeded())
    assert found.dtype == torch.float32
    assert int(left(network, found, goal).sum()) > 0


@every_norm
def test_single_steps_are_one_and_the_same(norm: Norm) -> None:
    """FGSM, one step of I-FGSM and one of MIM; in l2 MIM rounds twice where the others round once."""
    network, around, goal = case(norm, dtype=torch.float32)
    one, iterated, momentum = (
        attack.run(Plain(network), around, goal, seeded()) for attack in (FGSM(), IFGSM(1), MIM(1))
    )
    assert torch.equal(one, iterated)
    assert torch.allclose(one, momentum, atol=1e-6) if norm is Norm.L2 else torch.equal(one, momentum)
    assert not torch.equal(one, around.centre)


@every_norm
def test_one_step_is_as_long_as_the_radius(norm: Norm) -> None:
    around = ball(torch.zeros(3, 1, 4, 4), norm, 0.1)
    network = model(dtype=torch.float32)
    found = FGSM().run(Plain(network), around, Goal(network(around.centre).argmax(1)), seeded())
    distances = around.distance(found)
    assert torch.allclose(distances, torch.full_like(distances, around.radius.size), rtol=1e-5)


@every_norm
@every_attack
def test_more_effort_finds_no_less(name: str, norm: Norm) -> None:
    network, around, goal = case(norm, count=30)
    few, many = (
        int(left(network, ATTACKS[name](budget).run(Plain(network), around, goal, seeded()), goal).sum())
        for budget in (Budget(steps=2, queries=5), Budget(steps=20, queries=100))
    )
    assert many >= few
    assert many > 0


def test_the_strongest_attack_finds_what_any_other_finds() -> None:
    network, around, goal = case(Norm.LINF, count=60)
    found = {
        name: left(network, make(Budget(steps=40, queries=200)).run(Plain(network), around, goal, seeded()), goal)
        for name, make in ATTACKS.items()
    }
    for name in ATTACKS:
        assert int((found[name] & ~found["apgd_t"]).sum()) <= 1, name


@pytest.mark.parametrize("norm", NORMS)
def test_inputs_without_height_and_width_are_attacked_as_well(norm: Norm) -> None:
    network, around, goal = case(norm)
    flat = Ball.around(around.centre.flatten(1), around.radius)
    for name in DETERMINISTIC:
        attack = ATTACKS[name](BUDGET)
        images = attack.run(Plain(network), around, goal, seeded())
        assert (rows(images) == rows(attack.run(Plain(network), flat, goal, seeded()))).all()
    assert int(left(network, ATTACKS["square"](BUDGET).run(Plain(network), flat, goal, seeded()), goal).sum()) > 0

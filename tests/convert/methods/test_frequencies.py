"""Which frequencies go on rotating: known answers."""

import pytest
import torch
from tiny import tiny_config

from attention.rope import from_config
from convert.methods.frequencies import pairs_by_loss, pairs_by_stride, pairs_by_trial, pairs_on_ladder, shares


def test_the_most_costly_components_turn_in_the_order_of_frequencies() -> None:
    table = torch.tensor([[5.0, 1.0], [9.0, 8.0], [6.0, 2.0]])
    answers = [(), (1,), (1, 1), (1, 1, 2), (0, 1, 1, 2), (0, 1, 1, 2, 2), (0, 0, 1, 1, 2, 2)]
    assert [pairs_by_loss([table], count) for count in range(7)] == answers


def test_every_layer_counts_the_same_however_large_its_losses() -> None:
    small, large = torch.tensor([[4.0], [3.0], [3.0]]), torch.tensor([[0.0], [6000.0], [4000.0]])
    small, large = shares(small), shares(large)
    assert pairs_by_loss([small], 1) == (0,)
    assert pairs_by_loss([small, large], 1) == (1,)  # 0.4 : 0.9 : 0.7
    assert pairs_by_loss([small, small, small, large], 1) == (1,)  # 1.2 : 1.5 : 1.3
    assert pairs_by_loss([small] * 6 + [large], 1) == (0,)  # 2.4 : 2.4 : 2.2, and the first of equals
    assert pairs_by_loss([shares(small * 1e30), shares(large * 1e-30)], 2) == (1, 2)
    single, spread = torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.tensor([[0.0], [1.0], [0.9], [0.9]])
    single, spread = shares(single), shares(spread)
    assert pairs_by_loss([single, spread, spread], 1) == (0,)  # 1 : 0.71, the sums being one and not the maxima


def test_equals_are_taken_from_the_first_frequency_on() -> None:
    for count in range(7):
        assert pairs_by_loss([torch.ones(3, 2)], count) == (0, 0, 1, 1, 2, 2)[:count]
        assert pairs_by_loss([torch.zeros(3, 2)], count) == (0, 0, 1, 1, 2, 2)[:count]


def test_what_is_close_is_tried() -> None:
    """Errors add up here: frequency 3 is worth more than its logits say, and 1 less."""
    worth = {0: 9.0, 1: 0.5, 2: 3.0, 3: 2.0, 4: 1.0, 5: 0.0}
    table, asked = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])[:, None], []

    def errors(choices: list[list[int]]) -> list[float]:
        asked.extend(map(list, choices))
        return [20 - sum(worth[pair] for pair in choice) for choice in choices]

    assert pairs_by_loss([table], 3) == (0, 1, 2)
    assert pairs_by_trial([table], 3, errors) == (0, 2, 3)
    assert sorted(map(sorted, asked)) == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5], [0, 2], [1, 2]]
    asked.clear()
    assert pairs_by_trial([table], 1, errors) == (0,)
    assert pairs_by_trial([table], 6, errors) == (0, 1, 2, 3, 4, 5)
    assert not asked, "there is nothing to try"
    both = torch.tensor([[6.0, 5.0], [4.0, 3.0], [2.0, 1.0]])
    assert pairs_by_trial([both], 3, errors) == (0, 0, 2)
    assert [sorted(choice) for choice in asked] == [[0, 0, 1], [0, 1], [0, 0], [0, 0, 1, 1], [0, 0, 1, 2]], (
        "components, one each"
    )


@pytest.mark.parametrize(
    ("costly", "count", "ladder"),
    [
        ((0, 1, 2, 3), 4, (0, 1, 2, 3)),
        ((4, 8, 12), 4, (0, 4, 8, 12)),
        ((10, 15), 4, (0, 5, 10, 15)),
        ((15,), 9, tuple(range(9))),
        ((3,), 1, (0,)),
    ],
)
def test_a_ladder_holds_most_of_what_is_costly(costly: tuple[int, ...], count: int, ladder: tuple[int, ...]) -> None:
    table = torch.full((16, 2), 0.01)
    table[list(costly), 0] = 1
    assert pairs_on_ladder([table], count) == ladder


def test_a_strided_choice_is_deepseeks_own_rope() -> None:
    config = tiny_config("llama", head_dim=32)
    whole = from_config(config, 32)
    for dims in (2, 4, 8, 16, 32):
        pairs = pairs_by_stride(dims, 32)
        assert pairs == tuple(range(0, 16, 32 // dims))
        own = from_config(tiny_config("deepseek_v3", head_dim=dims, qk_rope_head_dim=dims), dims)
        torch.testing.assert_close(whole.select(list(pairs), "interleaved").frequencies, own.frequencies, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("rope_dim", "pairs"),
    [(8, (0, 1, 2, 3)), (16, (0, 0, 1, 1, 2, 2, 3, 3)), (12, (0, 0, 1, 2, 2, 3)), (6, (0, 1, 2)), (2, (0,))],
)
def test_more_rotary_dims_than_a_head_has_go_round_again(rope_dim: int, pairs: tuple[int, ...]) -> None:
    assert pairs_by_stride(rope_dim, 8) == pairs

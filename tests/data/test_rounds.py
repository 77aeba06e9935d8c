"""Which rows make a round. A row is its own number: those of sst start at 0, of para at 100, of sts at 200."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_minbert import get_tasks
from hf_minbert.data.rounds import (
    MIXING,
    RowSampler,
    fetch,
    inverse_batch_size_weights,
    label_groups,
    proportional_batch_sizes,
)
from hf_minbert.errors import MinBertError

STARTS = {"sst": 0, "para": 100, "sts": 200}


def toy(**sizes):
    return {task: [{"row": STARTS[task] + i} for i in range(size)] for task, size in sizes.items()}


def rounds_of(sizes, batch=2, *, mixing="cycle", seed=0, processes=1, epoch=0, **options):
    """`options`, such as `rows`, are of the samplers: `{task: value}`."""
    batches = batch if isinstance(batch, dict) else dict.fromkeys(sizes, batch)
    samplers = {
        task: RowSampler(task, size, seed=seed, **{name: of[task] for name, of in options.items() if task in of})
        for task, size in sizes.items()
    }
    rounds = MIXING[mixing](toy(**sizes), batches, samplers, num_processes=processes, seed=seed)
    rounds.set_epoch(epoch)
    return rounds


def numbers(rounds, task):
    """The task's rows over the epoch, batch by batch."""
    held = [rounds[index] for index in range(len(rounds))]
    return [[row["row"] for row in one[task]] for one in held if task in one]


def flat(rounds, task):
    return list(chain.from_iterable(numbers(rounds, task)))


def test_cycle_goes_on_until_the_longest_task_ends():
    rounds = rounds_of({"sst": 6, "para": 8, "sts": 6})  # 3, 4 and 3 batches of 2
    assert len(rounds) == 4
    seen = [rounds[index] for index in range(4)]
    assert sum(len(one) for one in seen) == 12  # batches
    assert all(len(rows) == 2 for one in seen for rows in one.values())
    assert sorted(flat(rounds, "para")) == list(range(100, 108))
    for task in ("sst", "sts"):
        assert set(flat(rounds, task)) == set(range(STARTS[task], STARTS[task] + 6))


def test_shortest_ends_with_the_task_of_the_fewest_rounds():
    rounds = rounds_of({"sst": 6, "para": 8, "sts": 5}, mixing="shortest")
    assert len(rounds) == 3 and sum(len(rounds[index]) for index in range(3)) == 9  # batches
    assert len(set(flat(rounds, "para"))) == 6
    assert set(flat(rounds, "para")) != set(flat(rounds_of({"sst": 6, "para": 8}, mixing="shortest", epoch=1), "para"))


DRAWN = ["proportional", "temperature", "annealed"]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("mixing", DRAWN)
def test_a_drawn_step_has_one_task_the_same_in_all_processes(mixing, processes):
    sizes = {"sst": 40, "para": 80, "sts": 12}
    rounds = rounds_of(sizes, mixing=mixing, processes=processes)
    assert len(rounds) == sum(-(-size // (2 * processes)) * processes for size in sizes.values())
    held = [rounds[index] for index in range(len(rounds))]
    steps = [held[start : start + processes] for start in range(0, len(held), processes)]
    assert all(len({*map(tuple, step)}) == 1 and len(step[0]) == 1 for step in steps)
    for task in sizes:
        batches = [one[task] for one in held if task in one]
        assert len(batches) == rounds.rounds_with(task)
        assert {len(rows) for rows in batches} <= {2}
    assert rounds.num_rows == 2 * len(rounds)


@pytest.mark.parametrize("mixing", DRAWN)
def test_drawn_rounds_of_two_processes_hold_the_rows_of_one_with_twice_the_batch(mixing):
    sizes = {"sst": 40, "para": 80}
    two, one = rounds_of(sizes, 2, mixing=mixing, processes=2), rounds_of(sizes, 4, mixing=mixing)
    assert len(two) == 2 * len(one)
    for step in range(len(one)):
        ((task, rows),) = one[step].items()
        assert [*two[2 * step][task], *two[2 * step + 1][task]] == [*rows]


@pytest.mark.parametrize(
    ("mixing", "epoch", "shares"),
    [
        ("proportional", 0, [0.9, 0.1]),
        ("temperature", 0, [0.75, 0.25]),  # T is 2: 3 to 1
        ("annealed", 0, [0.9, 0.1]),
        ("annealed", 4, [9**0.2 / (9**0.2 + 1), 1 / (9**0.2 + 1)]),
        ("annealed", 9, [9**0.2 / (9**0.2 + 1), 1 / (9**0.2 + 1)]),
    ],
)
def test_how_often_a_drawn_task_comes(mixing, epoch, shares):
    sizes = {"para": 9000, "sst": 1000}
    samplers = {task: RowSampler(task, size, seed=0) for task, size in sizes.items()}
    rounds = MIXING[mixing](toy(**sizes), dict.fromkeys(sizes, 1), samplers, epochs=5)
    rounds.set_epoch(epoch)
    found = [rounds.rounds_with(task) / len(rounds) for task in sizes]
    assert found == pytest.approx(shares, abs=0.015)  # three standard deviations of 10,000 draws


@pytest.mark.parametrize(("epochs", "exponents"), [(5, [1, 0.8, 0.6, 0.4, 0.2]), (2, [1, 0.2]), (1, [1])])
def test_annealing_falls_evenly_from_the_first_epoch_to_the_last(epochs, exponents):
    rounds = MIXING["annealed"](toy(sst=1), {"sst": 1}, {"sst": RowSampler("sst", 1, seed=0)}, epochs=epochs)
    for epoch, exponent in enumerate(exponents):
        rounds.set_epoch(epoch)
        assert rounds.chances(np.array([10.0])) == pytest.approx([10**exponent])


@pytest.mark.parametrize("mixing", DRAWN)
def test_a_drawn_round_is_a_function_of_seed_epoch_and_index_alone(mixing):
    sizes = {"sst": 40, "para": 80}
    first, again = rounds_of(sizes, mixing=mixing, epoch=3), rounds_of(sizes, mixing=mixing, epoch=3)
    for index in (17, 3, 59):
        assert again[index] == first[index]
    other = rounds_of(sizes, mixing=mixing, epoch=4)
    assert [tuple(other[index]) for index in range(60)] != [tuple(first[index]) for index in range(60)]
    seeded = rounds_of(sizes, mixing=mixing, epoch=3, seed=1)
    assert [tuple(seeded[index]) for index in range(60)] != [tuple(first[index]) for index in range(60)]


@pytest.mark.parametrize("sizes", [{"sst": 5, "para": 7, "sts": 1}, {"sst": 1}, {"para": 9, "sts": 4}])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("processes", [1, 3])
def test_every_row_is_seen_equally_often_and_under_its_own_task(sizes, batch, processes):
    rounds = rounds_of(sizes, batch, processes=processes)
    for task, size in sizes.items():
        assert {len(rows) for rows in numbers(rounds, task)} == {batch}
        counts = Counter(flat(rounds, task))
        assert set(counts) == set(range(STARTS[task], STARTS[task] + size))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_the_length_is_the_epoch_of_the_longest_task_rounded_up_to_the_processes():
    assert [len(rounds_of({"sst": 9, "para": 4}, 2, processes=n)) for n in (1, 2, 3, 4)] == [5, 6, 6, 8]


def test_each_task_has_its_own_batch_size_and_the_longest_is_counted_in_rounds():
    rounds = rounds_of({"sst": 8, "para": 6}, {"sst": 4, "para": 1})
    assert len(rounds) == 6  # para has fewer rows and more batches
    assert {len(rows) for rows in numbers(rounds, "sst")} == {4}
    assert sorted(flat(rounds, "para")) == list(range(100, 106))


def test_the_order_is_new_in_each_epoch_and_in_each_pass():
    sizes = {"sst": 60, "para": 20}
    rounds = rounds_of(sizes)
    passes = [flat(rounds, "para")[start : start + 20] for start in (0, 20, 40)]
    assert [sorted(one) for one in passes] == [list(range(100, 120))] * 3
    epochs = [flat(rounds_of(sizes, epoch=epoch), "para")[:20] for epoch in (1, 2)]
    different = {tuple(order) for order in [*passes, *epochs, range(100, 120)]}
    assert len(different) == 6


def test_a_round_is_a_function_of_seed_epoch_and_index_alone():
    sizes = {"sst": 30, "para": 11}
    there = rounds_of(sizes, seed=3, epoch=5)
    forwards = [there[index] for index in range(len(there))]
    again = rounds_of(sizes, seed=3)
    for epoch in (1, 5, 0, 5):  # as after a resume, or in a loader that looks ahead
        again.set_epoch(epoch)
    backwards = [again[index] for index in reversed(range(len(again)))]
    assert backwards[::-1] == forwards
    assert [rounds_of(sizes, seed=4, epoch=5)[index] for index in range(len(there))] != forwards


def test_tasks_of_equal_length_are_ordered_independently():
    rounds = rounds_of({"sst": 30, "para": 30})
    assert [number + 100 for number in flat(rounds, "sst")] != flat(rounds, "para")


def test_another_task_does_not_change_a_tasks_order():
    alone, beside = rounds_of({"para": 20}), rounds_of({"sts": 60, "para": 20, "sst": 3})
    assert numbers(beside, "para")[:10] == numbers(alone, "para")


#: Options of the samplers of sst, para and sts; groups of 13, 7 and 4 rows.
DRAWS = {
    "shuffled": {},
    "fewer rows": {"rows": {"sst": 0.5, "sts": 3}},
    "the same fewer rows": {"rows": {"sst": 0.5, "sts": 3}, "redraw": {"sst": False, "sts": False}},
    "balanced": {"groups": {"sst": np.arange(13) // 9, "para": np.arange(7) % 3}},
    "balanced and fewer": {"groups": {"sst": np.arange(13) // 9}, "rows": {"sst": 9}, "redraw": {"sst": False}},
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("mixing", MIXING)
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_see_at_each_step_what_one_sees_in_a_larger_batch(processes, mixing, draw):
    sizes, given = {"sst": 13, "para": 7, "sts": 4}, {"epoch": 1, "mixing": mixing, **DRAWS[draw]}
    many = rounds_of(sizes, {"sst": 2, "para": 1, "sts": 2}, processes=processes, **given)
    one = rounds_of(sizes, {"sst": 2 * processes, "para": processes, "sts": 2 * processes}, **given)
    assert len(many) == processes * len(one)
    assert many.num_rows == one.num_rows
    for step in range(len(one)):
        dealt = [many[step * processes + rank] for rank in range(processes)]
        assert all(share.keys() == one[step].keys() for share in dealt)
        for task in one[step]:
            assert list(chain.from_iterable(share[task] for share in dealt)) == one[step][task]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("mixing", MIXING)
def test_any_draw_is_a_function_of_seed_epoch_and_index_alone(mixing, draw):
    sizes = {"sst": 13, "para": 7, "sts": 4}
    there = rounds_of(sizes, mixing=mixing, epoch=2, **DRAWS[draw])
    forwards = [there[index] for index in range(len(there))]
    again = rounds_of(sizes, mixing=mixing, **DRAWS[draw])
    for epoch in (0, 3, 2):
        again.set_epoch(epoch)
    assert [again[index] for index in reversed(range(len(again)))][::-1] == forwards


@pytest.mark.parametrize("draw", DRAWS)
def test_another_task_does_not_change_what_is_drawn_of_a_task(draw):
    sizes, batches = {"sts": 4, "sst": 13, "para": 7}, {"sts": 3, "sst": 2, "para": 1}
    alone, beside = rounds_of({"sst": 13}, **DRAWS[draw]), rounds_of(sizes, batches, **DRAWS[draw])
    assert numbers(beside, "sst")[: len(alone)] == numbers(alone, "sst")


# ---- once


def test_once_lets_a_task_that_is_through_leave_the_rounds():
    rounds = rounds_of({"sst": 6, "para": 4, "sts": 10}, mixing="once")
    assert len(rounds) == 5
    held = [set(rounds[index]) for index in range(5)]
    assert held == [{"sst", "para", "sts"}] * 2 + [{"sst", "sts"}] + [{"sts"}] * 2
    for task, size in (("sst", 6), ("para", 4), ("sts", 10)):
        assert sorted(flat(rounds, task)) == list(range(STARTS[task], STARTS[task] + size))
    assert rounds.num_rows == 6 + 4 + 10


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("processes", [1, 3])
def test_once_shows_every_row_and_fills_the_last_batches_of_a_task_up(batch, processes):
    sizes = {"sst": 5, "para": 7, "sts": 1}
    rounds = rounds_of(sizes, batch, mixing="once", processes=processes)
    for task, size in sizes.items():
        steps = -(-size // (batch * processes))
        assert [len(rows) for rows in numbers(rounds, task)] == [batch] * steps * processes
        counts = Counter(flat(rounds, task))
        assert len(counts) == size
        assert counts.total() - size < batch * processes  # less than a step's rows are seen again


def test_a_cycle_counts_the_rows_that_it_shows_again():
    assert rounds_of({"sst": 6, "para": 4}, {"sst": 2, "para": 3}).num_rows == 3 * (2 + 3)


# ---- fewer rows


@pytest.mark.parametrize(
    ("asked", "found"), [(0.25, 5), (7, 7), (1, 1), (1.0, 20), (0.001, 1), (0.12, 2), (0.13, 3), (None, 20)]
)
def test_the_length_of_an_epoch_follows_from_the_rows_drawn(asked, found):
    rounds = rounds_of({"para": 20}, 1, rows={"para": asked})
    assert len(rounds) == found
    assert len(set(flat(rounds, "para"))) == found  # without replacement


def test_each_epoch_draws_anew_and_its_passes_are_over_the_same_rows():
    draws = []
    for epoch in range(3):
        rounds = rounds_of({"sst": 40, "para": 40}, epoch=epoch, rows={"para": 10})
        passes = [flat(rounds, "para")[start : start + 10] for start in (0, 10, 20, 30)]
        assert len({frozenset(one) for one in passes}) == 1
        assert len({tuple(one) for one in passes}) == 4  # each in an order of its own
        draws.append(frozenset(passes[0]))
    assert len(set(draws)) == 3


def test_without_redrawing_all_epochs_keep_the_first_draw():
    epochs = [
        flat(rounds_of({"para": 40}, epoch=epoch, rows={"para": 10}, redraw={"para": False}), "para")
        for epoch in range(3)
    ]
    assert len({frozenset(one) for one in epochs}) == 1
    assert len({tuple(one) for one in epochs}) == 3
    other = flat(rounds_of({"para": 40}, seed=1, rows={"para": 10}, redraw={"para": False}), "para")
    assert set(other) != set(epochs[0])


def test_what_training_may_come_to_see():
    assert RowSampler("para", 9, seed=0, rows=3).within_reach().tolist() == list(range(9))
    kept = RowSampler("para", 9, seed=0, rows=3, redraw=False)
    assert kept.within_reach().tolist() == sorted(kept.order(epoch=4, number=1).tolist())


def test_without_a_number_of_rows_there_is_nothing_to_keep():
    groups = np.arange(9) % 2
    keeping, drawing = (RowSampler("para", 9, seed=0, groups=groups, redraw=redraw) for redraw in (False, True))
    assert keeping.order(1, 0).tolist() == drawing.order(1, 0).tolist()


def test_more_rows_than_there_are_are_refused_with_both_numbers():
    with pytest.raises(MinBertError, match="`rows_per_epoch` of 'para' asks for 10 rows, and there are 9."):
        rounds_of({"para": 9}, rows={"para": 10})


# ---- batch sizes in proportion to the rows


@pytest.mark.parametrize(
    ("rows", "largest", "sizes"),
    [
        ({"sst": 8544, "para": 141506, "sts": 6040}, 24, [1, 24, 1]),  # 1.45 and 1.02: the sizes of report 003
        ({"sst": 8544, "para": 141506, "sts": 6040}, 96, [6, 96, 4]),  # 5.80 and 4.10
        ({"sst": 8000, "para": 280000, "sts": 6000}, 70, [2, 70, 2]),  # 2 and 1.5, which is rounded up
        ({"sst": 8000, "para": 280000, "sts": 6000}, 69, [2, 69, 1]),  # 1.97 and 1.48
        ({"sst": 4000, "para": 280000}, 35, [1, 35]),  # .5
        ({"sst": 7, "para": 7}, 3, [3, 3]),
        ({"sts": 5}, 8, [8]),
    ],
)
def test_batch_sizes_in_proportion_to_the_rows(rows, largest, sizes):
    assert proportional_batch_sizes(rows, largest) == dict(zip(rows, sizes, strict=True))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.integers(1, 512), st.integers(1, 4))
def test_tasks_with_proportional_batches_end_as_near_to_each_other_as_whole_numbers_allow(counts, largest, processes):
    rows = {str(task): count for task, count in enumerate(counts)}
    if min(counts) * largest * 2 < max(counts):
        with pytest.raises(MinBertError, match="leaves '.' no row in a round"):
            proportional_batch_sizes(rows, largest)
        return
    sizes = proportional_batch_sizes(rows, largest)
    steps = max(counts) / largest  # of the longest task, on one process
    for task, size in sizes.items():
        assert size >= 1
        assert abs(steps * size - rows[task]) <= steps / 2 * (1 + 1e-12)  # no other size is nearer
        # It ends within one step of the longest, but for the rounding of its batch, which is half a row at most.
        own, longest = (-(-count // (b * processes)) for count, b in ((rows[task], size), (max(counts), largest)))
        assert abs(own - longest) <= 1 + steps / processes / (2 * size)


@given(st.lists(st.integers(1, 64), min_size=2, max_size=5), st.integers(1, 5000), st.data())
def test_tasks_whose_rows_are_whole_batches_end_together_whatever_the_last_ones_lack(batches, steps, data):
    """Where batches of the wanted sizes exist, they are found, and all tasks need the same number of rounds."""
    rows = {str(task): size * steps for task, size in enumerate(batches)}
    assert [*proportional_batch_sizes(rows, max(batches)).values()] == batches
    for task, size in enumerate(batches):
        if task != batches.index(max(batches)):
            rows[str(task)] -= data.draw(st.integers(0, min(size, steps // 2)))
    sizes = proportional_batch_sizes(rows, max(batches))
    assert [*sizes.values()] == batches
    needed = [-(-rows[task] // size) for task, size in sizes.items()]
    assert max(needed) - min(needed) <= 1


@pytest.mark.parametrize("largest", [11, 1])
def test_a_task_that_would_have_no_row_in_a_round_is_refused_with_the_least_size_that_does(largest):
    rows = {"sst": 8544, "para": 141506, "sts": 6040}
    with pytest.raises(MinBertError, match=r"'sts' no row.*6,040 rows.*'para' has 141,506.*to 12 or more"):
        proportional_batch_sizes(rows, largest)
    assert proportional_batch_sizes(rows, 12) == {"sst": 1, "para": 12, "sts": 1}


@pytest.mark.parametrize("mixing", MIXING)
def test_two_processes_see_the_rows_of_one_with_batches_twice_as_large(mixing):
    """The sizes are per device, and twice as large where the largest is, if no rounding comes between."""
    rows = {"sst": 24, "para": 48, "sts": 12}
    halves, wholes = proportional_batch_sizes(rows, 4), proportional_batch_sizes(rows, 8)
    assert wholes == {task: 2 * size for task, size in halves.items()} == {"sst": 4, "para": 8, "sts": 2}
    two, one = rounds_of(rows, halves, mixing=mixing, processes=2), rounds_of(rows, wholes, mixing=mixing)
    assert len(two) == 2 * len(one)
    for step in range(len(one)):
        for task, whole in one[step].items():
            assert two[2 * step][task] + two[2 * step + 1][task] == whole


@pytest.mark.parametrize("mixing", ["cycle", "once", "shortest"])
def test_all_rows_are_seen_once_and_no_task_leaves_or_starts_again_where_batches_fit(mixing):
    rows = {"sst": 12, "para": 40, "sts": 8}
    rounds = rounds_of(rows, proportional_batch_sizes(rows, 10), mixing=mixing)
    assert [{task: len(batch) for task, batch in rounds[index].items()} for index in range(len(rounds))] == [
        {"sst": 3, "para": 10, "sts": 2}
    ] * 4
    assert all(len(set(flat(rounds, task))) == count for task, count in rows.items())


def test_weights_by_equation_7_of_report_003():
    assert inverse_batch_size_weights({"sst": 1, "para": 24, "sts": 1}) == {"sst": 1.0, "para": 1 / 24, "sts": 1.0}
    assert inverse_batch_size_weights({"sst": 6, "para": 96, "sts": 4}) == {"sst": 4 / 6, "para": 1 / 24, "sts": 1.0}
    assert inverse_batch_size_weights({"sst": 8, "para": 8}) == {"sst": 1.0, "para": 1.0}


# ---- balanced


def test_balanced_sampling_draws_each_group_and_each_row_of_a_group_equally_often():
    groups = np.repeat([0, 1, 4], [900, 90, 10])  # groups without a row take no part
    order = np.concatenate([RowSampler("sst", 1000, seed=0, groups=groups).order(0, number) for number in range(30)])
    shares = np.bincount(groups[order]) / len(order)
    assert shares[[0, 1, 4]] == pytest.approx([1 / 3] * 3, abs=0.02)
    rare = np.bincount(order[order >= 990] - 990, minlength=10)
    assert rare / rare.sum() == pytest.approx([0.1] * 10, abs=0.02)


def test_a_balanced_pass_is_as_long_as_the_rows_and_each_pass_and_epoch_draws_anew():
    sampler = RowSampler("sst", 50, seed=0, groups=np.arange(50) % 2)
    passes = [sampler.order(epoch, number) for epoch in (0, 1) for number in (0, 1)]
    assert {len(one) for one in passes} == {50}
    assert len({frozenset(one.tolist()) for one in passes}) == 4
    assert all(len(set(one.tolist())) < 50 for one in passes)  # with replacement
    fewer = RowSampler("sst", 50, seed=0, groups=np.arange(50) % 2, rows=0.2)
    assert len(fewer.order(0, 0)) == 10


def test_scores_are_put_in_bins_of_equal_width():
    (sts,), scores = get_tasks(["sts"]), np.array([0.0, 0.99, 1.0, 2.5, 4.0, 4.99, 5.0])
    assert label_groups(sts, scores, 5).tolist() == [0, 0, 1, 2, 4, 4, 4]
    assert label_groups(sts, scores, 2).tolist() == [0, 0, 0, 1, 1, 1, 1]
    (one_to_five,) = get_tasks({"own": {"kind": "score", "text_columns": ["text"], "range": [1, 5]}})
    assert label_groups(one_to_five, np.array([1.0, 2.0, 2.99, 3.0, 5.0]), 2).tolist() == [0, 0, 0, 1, 1]
    edges = np.arange(51) / 10
    assert label_groups(sts, edges, 50).tolist() == label_groups(sts, edges.astype(np.float32), 50).tolist()
    assert label_groups(get_tasks(["sst"])[0], np.array([3, 0]), 5).tolist() == [3, 0]


@pytest.mark.parametrize("empty", ["sst", "para", "sts"])
def test_an_empty_task_is_refused(empty):
    with pytest.raises(MinBertError, match=f"'{empty}' has no training rows.*do not train it"):
        rounds_of({"sst": 4, "para": 4, "sts": 4, empty: 0})


def test_rows_are_fetched_in_one_call_where_the_dataset_can():
    class Batched(list):
        calls = 0

        def __getitems__(self, indices):
            self.calls += 1
            return [self[index] for index in indices]

    rows = Batched(range(10))
    assert fetch(rows, (7, 0, 7)) == [7, 0, 7]
    assert rows.calls == 1
    assert fetch(range(10), (7, 0, 7)) == [7, 0, 7]


@pytest.mark.parametrize("mixing", DRAWN)
@pytest.mark.parametrize(("steps", "per_step", "processes"), [(1, 1, 1), (3, 1, 1), (5, 2, 1), (40, 3, 2), (4, 1, 2)])
def test_the_rounds_of_a_run_are_counted_until_all_tasks_are_drawn(mixing, steps, per_step, processes):
    sizes = {"sst": 40, "para": 6, "sts": 3}
    rounds = rounds_of(sizes, 2, mixing=mixing, processes=processes, epoch=1)
    found = rounds.drawn(steps, per_step)
    assert rounds.epoch == 1
    # Epoch by epoch as the loop takes them: the last step of each has the rounds that are left.
    expected, left, epoch = Counter(dict.fromkeys(sizes, 0)), steps, 0
    while left > 0 and 0 in expected.values():
        rounds.set_epoch(epoch)
        held = [[*rounds[index]] for index in range(0, len(rounds), processes)]
        groups = [held[start : start + per_step] for start in range(0, len(held), per_step)][:left]
        expected.update(task for group in groups for (task,) in group)
        left, epoch = left - len(groups), epoch + 1
    assert found == expected

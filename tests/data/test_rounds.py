"""Which rows make a round. A row is its own number: those of sst start at 0, of para at 100, of sts at 200."""

from collections import Counter
from itertools import chain

import pytest

from hf_minbert.data.rounds import Cycle, fetch
from hf_minbert.errors import MinBertError

STARTS = {"sst": 0, "para": 100, "sts": 200}


def toy(**sizes):
    return {task: [{"row": STARTS[task] + i} for i in range(size)] for task, size in sizes.items()}


def cycle(sizes, batch=2, *, seed=0, processes=1, epoch=0):
    batches = batch if isinstance(batch, dict) else dict.fromkeys(sizes, batch)
    rounds = Cycle(toy(**sizes), batches, seed=seed, num_processes=processes)
    rounds.set_epoch(epoch)
    return rounds


def numbers(rounds, task):
    """The task's rows over the epoch, batch by batch."""
    return [[row["row"] for row in rounds[index][task]] for index in range(len(rounds))]


def flat(rounds, task):
    return list(chain.from_iterable(numbers(rounds, task)))


def test_cycle_goes_on_until_the_longest_task_ends():
    rounds = cycle({"sst": 6, "para": 8, "sts": 6})  # 3, 4 and 3 batches of 2
    assert len(rounds) == 4
    seen = [rounds[index] for index in range(4)]
    assert sum(len(one) for one in seen) == 12  # batches
    assert all(len(rows) == 2 for one in seen for rows in one.values())
    assert sorted(flat(rounds, "para")) == list(range(100, 108))
    for task in ("sst", "sts"):
        assert set(flat(rounds, task)) == set(range(STARTS[task], STARTS[task] + 6))


@pytest.mark.parametrize("sizes", [{"sst": 5, "para": 7, "sts": 1}, {"sst": 1}, {"para": 9, "sts": 4}])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("processes", [1, 3])
def test_every_row_is_seen_equally_often_and_under_its_own_task(sizes, batch, processes):
    rounds = cycle(sizes, batch, processes=processes)
    for task, size in sizes.items():
        assert {len(rows) for rows in numbers(rounds, task)} == {batch}
        counts = Counter(flat(rounds, task))
        assert set(counts) == set(range(STARTS[task], STARTS[task] + size))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_the_length_is_the_epoch_of_the_longest_task_rounded_up_to_the_processes():
    assert [len(cycle({"sst": 9, "para": 4}, 2, processes=n)) for n in (1, 2, 3, 4)] == [5, 6, 6, 8]


def test_each_task_has_its_own_batch_size_and_the_longest_is_counted_in_rounds():
    rounds = cycle({"sst": 8, "para": 6}, {"sst": 4, "para": 1})
    assert len(rounds) == 6  # para has fewer rows and more batches
    assert {len(rows) for rows in numbers(rounds, "sst")} == {4}
    assert sorted(flat(rounds, "para")) == list(range(100, 106))


def test_the_order_is_new_in_each_epoch_and_in_each_pass():
    sizes = {"sst": 60, "para": 20}
    rounds = cycle(sizes)
    passes = [flat(rounds, "para")[start : start + 20] for start in (0, 20, 40)]
    assert [sorted(one) for one in passes] == [list(range(100, 120))] * 3
    epochs = [flat(cycle(sizes, epoch=epoch), "para")[:20] for epoch in (1, 2)]
    different = {tuple(order) for order in [*passes, *epochs, range(100, 120)]}
    assert len(different) == 6


def test_a_round_is_a_function_of_seed_epoch_and_index_alone():
    sizes = {"sst": 30, "para": 11}
    there = cycle(sizes, seed=3, epoch=5)
    forwards = [there[index] for index in range(len(there))]
    again = cycle(sizes, seed=3)
    for epoch in (1, 5, 0, 5):  # as after a resume, or in a loader that looks ahead
        again.set_epoch(epoch)
    backwards = [again[index] for index in reversed(range(len(again)))]
    assert backwards[::-1] == forwards
    assert [cycle(sizes, seed=4, epoch=5)[index] for index in range(len(there))] != forwards


def test_tasks_of_equal_length_are_ordered_independently():
    rounds = cycle({"sst": 30, "para": 30})
    assert [number + 100 for number in flat(rounds, "sst")] != flat(rounds, "para")


def test_another_task_does_not_change_a_tasks_order():
    alone, beside = cycle({"para": 20}), cycle({"sts": 60, "para": 20, "sst": 3})
    assert numbers(beside, "para")[:10] == numbers(alone, "para")


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_see_at_each_step_what_one_sees_in_a_larger_batch(processes):
    sizes = {"sst": 13, "para": 7, "sts": 4}
    many, one = cycle(sizes, 2, processes=processes, epoch=1), cycle(sizes, 2 * processes, epoch=1)
    assert len(many) == processes * len(one)
    for step in range(len(one)):
        dealt = [many[step * processes + rank] for rank in range(processes)]
        for task in sizes:
            assert list(chain.from_iterable(share[task] for share in dealt)) == one[step][task]


@pytest.mark.parametrize("empty", ["sst", "para", "sts"])
def test_an_empty_task_is_refused(empty):
    with pytest.raises(MinBertError, match=f"'{empty}' has no training rows.*do not train it"):
        cycle({"sst": 4, "para": 4, "sts": 4, empty: 0})


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

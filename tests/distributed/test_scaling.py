"""scripts/benchmark_scaling.py from start to end, on two small processes: what it says of them is right."""

import json
import os
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.slow


def test_it_measures_what_moves_and_finds_two_processes_equal_to_one(together, tiny_bert, tmp_path):

    def job(rank: int) -> None:
        sys.path.append(str(SCRIPTS))
        import benchmark_scaling as script  # here, where the environment says which process this is

        whole = script.load_split
        script.load_split = lambda *given: whole(*given).select(range(41))  # an odd number: some row comes twice
        script.PROFILED = 1
        script.COMPARED = script.WAYS
        os.chdir(tmp_path)
        script.main(
            str(tiny_bert), way=[*script.WAYS], batch_size=[2], steps=2, equality_steps=3, json_file=Path("out.json")
        )

    ended = together(job)
    assert ended.status == [0, 0], ended.said
    numbers = json.loads((tmp_path / "out.json").read_text())
    parameters, speed = numbers["parameters"], {entry["way"]: entry for entry in numbers["speed"]}
    assert numbers["processes"] == 2 and all(entry["times"] > 0 for entry in numbers["speed"])
    # In a ring of two each process sends every number of an all-reduce once, and half of those of a shard's two ways.
    assert speed["sum"]["bytes"] == 4 * parameters
    assert speed["pcgrad"]["bytes"] == pytest.approx(3 * 4 * parameters, rel=0.1)  # heads once
    assert speed["pcgrad, sharded"]["bytes"] == pytest.approx(2 * 4 * parameters, rel=0.1)
    assert all(entry["communication_milliseconds"] > 0 for entry in numbers["speed"])
    exact, half = numbers["equality"]["pcgrad, fp32"], numbers["equality"]["pcgrad, bf16"]
    assert exact["same_bits_on_all_processes"] and half["same_bits_on_all_processes"]
    assert exact["predicted_rows"] == {"sst": 41, "para": 41, "sts": 41}
    assert 0 < exact["largest_difference"] < 1e-5 < half["relative_difference"] < 2 * half["spread_of_bf16"]
    assert "| pcgrad, sharded | 2 |" in ended.said[0] and "| pcgrad, bf16 | True |" in ended.said[0]

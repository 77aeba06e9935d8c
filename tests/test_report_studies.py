"""The studies of the reports' tables: that each row is there, with what is published, and is what its name says."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import typing
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_minbert import MinBertForMultiTask, MultiTaskTrainingArguments, Task, get_tasks
from hf_minbert.data.rounds import inverse_batch_size_weights, proportional_batch_sizes
from hf_minbert.run import pretraining
from hf_minbert.run import study as study_module
from hf_minbert.run.inputs import model_config
from hf_minbert.run.stages import plan
from hf_minbert.run.train import train
from hf_minbert.settings.recipe import packaged_recipes, read_value, recipes_folder, split_recipe
from hf_minbert.settings.run import RunSettings
from hf_minbert.settings.study import Study, packaged_studies, read_study
from hf_minbert.settings.tasks import Source
from hf_minbert.settings.words import check_words

SMALL = "reports/small"
REPORTS = [name for name in packaged_studies() if name.startswith("reports/")]
READ = {overrides: {name: read_study(name, overrides) for name in REPORTS} for overrides in (None, SMALL)}
STUDIES = READ[None]
#: Those that no report has.
COMPARISONS = {name: read_study(name) for name in packaged_studies() if name not in REPORTS}
#: How many rows each table of the reports with scores has; one of data is not among them.
TABLES = {
    "reports/000/table_2": 6, "reports/000/table_3": 2, "reports/000/table_4": 2,
    "reports/001/table_1": 5, "reports/001/table_2": 6, "reports/001/table_3": 6, "reports/001/table_4": 3,
    "reports/002/table_1": 9, "reports/002/table_2": 5,
    "reports/003/table_1": 31, "reports/003/table_2": 1,
    "reports/004/table": 7, "reports/004/test_table": 2,
}  # fmt: skip
#: Some cells of each, from the reports by hand.
PUBLISHED = {
    ("reports/000/table_2", "BERT-Base"): {"train_para_accuracy": 0.630, "sts_pearson": 0.245},
    ("reports/000/table_2", "BERT-FPT-FT-Multi 40 epochs"): {"train_sst_accuracy": 0.899, "para_accuracy": 0.758},
    ("reports/000/table_3", "With Gradient Surgery"): {"para_accuracy": 0.7863, "train_sts_pearson": 0.5770},
    ("reports/000/table_4", "With WRS"): {"sts_pearson": 0.468, "train_sts_pearson": 0.922},
    ("reports/001/table_1", "BiGRU FT"): {"sst_accuracy": 0.478, "train_sst_accuracy": 0.317},
    ("reports/001/table_2", "MNR FF noFT"): {"para_accuracy": 0.624, "train_para_accuracy": 0.271},
    ("reports/001/table_3", "Siamese-BiGRU FT"): {"sts_pearson": 0.369, "train_sts_pearson": 0.740},
    ("reports/001/table_4", "Ensembled Avg Weight Single BERT Dev"): {"para_accuracy": 0.706},
    ("reports/002/table_1", "PCGrad + SMART"): {"sst_accuracy": 0.486, "sts_pearson": 0.351},
    ("reports/002/table_2", "Class 4"): {"precision": 0.70, "f1": 0.42},
    ("reports/003/table_1", "ConcatA MultiNLI + GS_bd + FL"): {"sst_accuracy": 0.531, "sts_pearson": 0.389},
    ("reports/003/table_1", "ConcatB + AL MultiNLI + GS_w"): {"para_accuracy": 0.873, "sts_pearson": 0.877},
    ("reports/003/table_1", "ConcatB MultiNLI + FL"): {"para_accuracy": 0.753, "sts_pearson": 0.635},
    ("reports/003/table_2", "ConcatB + AL MultiNLI + GS_bd"): {"sst_accuracy": 0.539, "sts_pearson": 0.876},
    ("reports/004/table", "Increased Dropout"): {"sts_pearson": -0.043, "overall": 0.299},
    ("reports/004/test_table", "Gradient Surgery"): {"sts_pearson": 0.316, "overall": 0.516},
}
ROWS = [(study, row.name) for study, read in STUDIES.items() for row in read.rows if row.recipe]

Read = tuple[RunSettings, dict[str, typing.Any], list[Task]]


def with_words(study: Study, words: Iterable[str]) -> Study:
    read = {key: read_value(text, key) for key, _, text in (word.partition("=") for word in words)}
    return replace(study, words=read)


def runs(study: str, name: str, overrides: str | None = None, *words: str) -> dict[str, Read]:
    """The runs of a row by name: its stages or, under no name, itself."""
    read = COMPARISONS[study] if study in COMPARISONS else READ[overrides][study]
    values = with_words(read, words).recipe(read.row(name))
    check_words(values)
    stages = {stage.name: (stage.settings, stage.given) for stage in plan(values)}
    alone = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    return {stage: (*of, get_tasks(of[0].tasks)) for stage, of in (stages or {"": alone}).items()}


def run_of(study: str, name: str) -> Read:
    return runs(study, name)[""]


def differences(one: Read, other: Read) -> dict[str, typing.Any]:
    """What `one` trains with and `other` does not, or otherwise; `None` where only `other` has the key."""
    (_, mine, tasks), (_, theirs, other_tasks) = one, other
    changed = {key: mine.get(key) for key in {*mine, *theirs} - {"output_dir"} if mine.get(key) != theirs.get(key)}
    return changed | ({"tasks": True} if tasks != other_tasks else {})


def same_run(one: Read, other: Read) -> bool:
    """Whether two runs differ in nothing but where they begin and what they are called."""
    place = {"model_name_or_path": "", "output_dir": "", "stages": None}
    return not differences(one, other) and replace(one[0], **place) == replace(other[0], **place)


# ---- The tables


def test_each_table_has_a_study_and_each_of_its_rows_a_row():
    published = {name: [row for row in study.rows if row.reported] for name, study in STUDIES.items()}
    assert {name: len(rows) for name, rows in published.items()} == TABLES
    for name, rows in published.items():  # in their order; rows of ours come behind them
        assert [*STUDIES[name].rows[: len(rows)]] == rows


def test_published_scores_are_scores_of_the_studys_columns():
    for study in STUDIES.values():
        columns = study.metrics or ("sst_accuracy", "para_accuracy", "sts_pearson", "overall")
        for row in study.rows:
            assert {*row.reported} <= {*columns}
            assert all(-1 <= score <= 1 for score in row.reported.values())


@pytest.mark.parametrize("study", ["reports/004/table", "reports/004/test_table"])
def test_a_published_overall_is_the_mean_of_the_three(study):
    for row in STUDIES[study].rows:
        *scores, overall = row.reported.values()
        assert len(scores) == 3
        assert overall == pytest.approx(sum(scores) / 3, abs=6e-4)  # it has three digits


@pytest.mark.parametrize(("study", "row"), PUBLISHED)
def test_published_scores_are_those_of_the_report(study, row):
    assert PUBLISHED[study, row].items() <= STUDIES[study].row(row).reported.items()


def test_the_published_columns_of_a_task_are_whole():
    for name, study in STUDIES.items():
        columns = [{*row.reported} for row in study.rows if row.reported]
        assert all(column == columns[0] for column in columns), name


def test_a_row_that_is_not_run_lacks_data_or_is_no_training():
    data = ("MultiNLI", "SNLI", "test labels", "no training", "minbert report")
    for study in STUDIES.values():
        for row in study.rows:
            assert not row.not_run or any(reason in row.not_run for reason in data)
            assert row.recipe or "no training" in row.not_run


def test_the_row_whose_table_and_text_differ_says_so():
    (row,) = STUDIES["reports/003/table_2"].rows
    assert "GS_bd" in row.name and "GS_w" in row.note


def test_each_recipe_of_a_report_is_a_row_and_each_row_has_a_recipe_of_its_report():
    recipes = {name for name in packaged_recipes() if name.startswith("reports/")}
    assert {row.recipe for study in STUDIES.values() for row in study.rows} - {""} == recipes
    for name, study in STUDIES.items():
        assert all(Path(row.recipe).parent == Path(name).parent for row in study.rows if row.recipe)


# ---- What is compared, and claimed


def test_versions_are_compared_with_the_one_before_and_stages_with_the_row_without_the_last():
    versions = [row.name for row in STUDIES["reports/004/table"].rows]
    against = STUDIES["reports/004/table"].against
    assert [against[name] for name in versions] == [versions[-1], *versions[:-1]]
    against = STUDIES["reports/003/table_1"].against
    for name, other in against.items():
        if name.endswith(" + FL") and "GS" in name and "SICK" not in name:
            assert other == name.removesuffix(" + FL"), name
        elif "MultiNLI" in name or "SICK" in name:
            assert other == name.replace("MultiNLI + ", "").replace("SICK + ", ""), name
    for table in ("table_1", "table_2", "table_3"):
        pairs = STUDIES[f"reports/001/{table}"].against.items()
        assert all(other == name.replace("noFT", "FT") for name, other in pairs if "noFT" in name)


def test_claims_of_all_reports_have_their_place_and_are_no_lines_of_two():
    claims = [(name, claim) for name, study in STUDIES.items() for claim in study.claims]
    assert {name.split("/")[1] for name, _ in claims} == {f"00{number}" for number in range(5)}
    assert 25 <= len({(name, claim.says) for name, claim in claims}) <= 55
    for _, claim in claims:
        assert re.search(r"\((abstract|sections? \d|table \d).*\)\.$", claim.says), claim.says
        assert len(claim.says) <= 115, claim.says


def test_a_claim_of_reported_scores_has_their_direction():
    """By hand, of those whose words and row point the same way: a row that is better, and one that is worse."""
    found = {}
    for study in STUDIES.values():
        for claim in study.claims:
            ours, theirs = study.row(claim.row).reported, study.row(study.against[claim.row]).reported
            if not claim.finds and claim.within is None:
                found[claim.says] = {ours[metric] > theirs[metric] for metric in claim.metrics}
    assert found["PCGrad improves sst and para (section 5.4, table 1)."] == {True}
    assert found["The ranking loss is less accurate than cross-entropy (section 3.2.2)."] == {False}
    assert found["Gradient surgery improves sst and sts, and costs a little of para (section 6.1)."] == {True, False}


# ---- That each row can be run


@pytest.fixture
def six_layers(tiny_bert, tmp_path) -> Path:
    """A config as deep as that of the small checkpoint, of which rows take three layers for a task. No weights."""
    folder = tmp_path / "six-layers"
    shutil.copytree(tiny_bert, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    return folder


@pytest.mark.parametrize(
    ("study", "row", "overrides"),
    [(*row, overrides) for overrides in (None, SMALL) for row in ROWS]
    + [(name, row.name, None) for name, study in COMPARISONS.items() for row in study.rows if row.is_trained],
)
def test_a_row_is_a_recipe_that_trains(study, row, overrides, six_layers):
    given = runs(study, row, overrides, f"model_name_or_path={six_layers}", "use_cpu=true")
    for settings, training, tasks in given.values():
        args, by_name = MultiTaskTrainingArguments(**training), {task.name: task for task in tasks}
        if settings.objective == "mlm":
            pretraining.check(args, by_name)
        else:
            args.check_tasks(by_name)
            assert not args.without_effect(tasks)
            if Path(settings.model_name_or_path).is_dir():  # no stage's
                model_config(replace(settings, max_length=None), tasks)  # a tiny model reads 64 tokens
        assert settings.data_dir == "data"


@pytest.mark.parametrize(("study", "row"), ROWS)
def test_the_dropout_of_bert_is_off_only_where_each_row_is_read_once(study, row):
    """A stage takes over the config of the one before, so it has to say that the dropout is on again."""
    for settings, training, _ in runs(study, row).values():
        rates = {settings.hidden_dropout_prob, settings.attention_probs_dropout_prob}
        reads_once = training.get("freeze") == "encoder" and training.get("mixing") == "once"
        assert rates == {0.0} if reads_once else rates <= {None, 0.1}


def test_small_overrides_reach_each_run_and_only_what_they_name():
    read = READ[SMALL]["reports/000/table_3"]
    named = {*read.overrides["recipes"]}
    assert named <= {row.recipe for study in STUDIES.values() for row in study.rows}
    assert {*read.overrides["rows"]} <= {row.name for study in STUDIES.values() for row in study.rows}
    exceptions = {"reports/000/surgery": 1e-5}
    for study, name in ROWS:
        recipe = STUDIES[study].row(name).recipe
        given = runs(study, name, SMALL, "use_cpu=true")
        for stage, (settings, training, _) in given.items():
            rate = exceptions.get(recipe, 1e-4) if stage in ("", "all") else 1e-4
            assert training["learning_rate"] == rate
            assert (settings.max_length, training["bf16"], training["packing"]) == (128, True, True)
            assert "rows_per_epoch" not in training
    rates = {row.name: runs("reports/000/table_3", row.name, SMALL, "use_cpu=true")["all"][1] for row in read.rows}
    own = [of["learning_rates"]["encoder"] for of in rates.values() if "learning_rates" in of]
    assert own == [1e-3, 1e-4, 1e-5]  # what is asked there


def test_a_row_that_differs_in_epochs_does_so_with_the_small_overrides_too():
    for overrides, epochs in ((None, (10, 5)), (SMALL, (3, 1.5))):
        names = ("PCGrad + SMART", "PCGrad + SMART with 5 epochs")
        given = [runs("reports/002/table_1", name, overrides, "use_cpu=true")[""][1] for name in names]
        assert tuple(of["num_train_epochs"] for of in given) == epochs


def test_rows_of_the_small_overrides_that_are_one_training():
    """Its para has a tenth of the rows already."""
    runs_of = study_module.runs_of(READ[SMALL]["reports/002/table_1"], Path("root"))
    assert study_module.same_trainings(runs_of) == {"Random Sampling Baseline": "Baseline"}
    for name in ("reports/002/table_1", "reports/003/table_1", "reports/004/table"):
        assert not study_module.same_trainings(study_module.runs_of(STUDIES[name], Path("root")))


def test_each_line_of_the_small_overrides_has_its_reason():
    lines = (recipes_folder() / f"{SMALL}.overrides.yaml").read_text(encoding="utf-8").splitlines()
    values = [line for line in lines if line.startswith("  ") and not line.endswith(":") and ": *" not in line]
    assert len(values) > 12
    for line in values:
        assert "# " in line or line.rstrip().endswith(("&few", "&few_and_small", "&more")), line


# ---- What the rows are


def test_the_stages_of_report_000_are_those_of_its_table_2():
    study = "reports/000/table_2"
    staged = {row.name: runs(study, row.name) for row in STUDIES[study].rows[1:]}
    pipeline = staged["BERT-FPT-FT-Multi 5 epochs"]
    prefixes = {"BERT-FPT": ["pretrain", "score"], "BERT-FPT-FT": ["pretrain", "heads"]}
    assert {name: [*staged[name]] for name in prefixes} == prefixes
    assert [*pipeline] == ["pretrain", "heads", "all"]
    for name, stages in staged.items():
        assert all(same_run(stages[stage], pipeline[stage]) for stage in ("pretrain", "heads") if stage in stages), (
            name
        )
    settings, training, tasks = pipeline["pretrain"]
    assert (settings.objective, settings.mlm_order, settings.mlm_probability) == ("mlm", "sequence", 0.15)
    assert [task.name for task in tasks] == ["sst", "para", "sts"]
    assert training["num_train_epochs"] == pipeline["heads"][1]["num_train_epochs"] == 5
    assert differences(pipeline["heads"], pipeline["all"]) == {
        "freeze": "encoder", "mixing": "once", "task_weights": None,
    }  # fmt: skip
    last = {name: differences(staged[f"BERT-FPT-FT-Multi {name}"]["all"], pipeline["all"]) for name in (
        "15 epochs", "40 epochs", "decay for sts",
    )}  # fmt: skip
    assert last == {
        "15 epochs": {"num_train_epochs": 15}, "40 epochs": {"num_train_epochs": 40},
        "decay for sts": {"weight_decays": {"sts": 0.01}},
    }  # fmt: skip
    assert [*staged["BERT-FT figure 2"]] == ["heads"]
    base = runs(study, "BERT-Base")[""]
    untrained = {"freeze": "encoder", "learning_rates": {"heads": 0.0}, "max_steps": 1}
    plain = dict.fromkeys(("num_train_epochs", "mixing", "task_weights"))
    assert differences(base, pipeline["all"]) == untrained | plain
    assert differences(staged["BERT-FPT"]["score"], base) == {"num_train_epochs": 5}


def test_the_growing_freeze_has_the_epochs_of_the_last_stage_and_frees_no_layer_again():
    stages = [*runs("reports/000/table_2", "BERT-FPT-FT-Multi growing freeze").items()][2:]
    frozen = [training.get("freeze", 0) for _, (_, training, _) in stages]
    assert frozen == sorted({*frozen}) and len(frozen) == 3
    assert sum(training["num_train_epochs"] for _, (_, training, _) in stages) == 5


def test_table_3_of_report_000_is_its_third_stage_behind_the_two_others():
    study = "reports/000/table_3"
    surgery, without = (runs(study, name) for name in ("With Gradient Surgery", "Without Gradient Surgery"))
    table_2 = runs("reports/000/table_2", "BERT-FPT-FT-Multi 5 epochs")
    assert [*surgery] == [*without] == [*table_2]
    assert all(
        same_run(surgery[stage], other[stage]) for stage in ("pretrain", "heads") for other in (without, table_2)
    )
    assert differences(surgery["all"], without["all"]) == {"aggregator": "pcgrad"}
    rest = {"aggregator": "pcgrad", "learning_rate": 1e-6, "num_train_epochs": 3}  # section 4.6
    assert differences(surgery["all"], table_2["all"]) == rest


def test_as_many_tensors_can_conflict_as_the_note_says(tiny_config):
    """Those that three tasks share: of BERT-base 5 of the embeddings and 16 a layer, as no [CLS] passes the pooler."""
    tasks = runs("reports/000/table_3", "With Gradient Surgery")["all"][2]
    assert {task.pooling for task in tasks} == {"cls"}
    config = tiny_config(tasks=tasks, num_hidden_layers=12)
    with torch.device("meta"):
        names = [name for name, _ in MinBertForMultiTask(config).named_parameters() if name.startswith("bert.")]
    shared = [name for name in names if ".pooler." not in name]
    assert len(shared) == 5 + 16 * 12
    assert 3 * 2 * len(shared) == 1182


def test_report_001_trains_each_task_alone_at_its_own_rates():
    rates = {"sst": (2e-5, 0.01), "para": (1e-5, 0.01), "sts": (1e-5, 0.1)}  # section 4.3
    for table in ("table_1", "table_2", "table_3"):
        for row in STUDIES[f"reports/001/{table}"].rows:
            _, training, (task,) = run_of(f"reports/001/{table}", row.name)
            assert task.name == Path(row.recipe).name.split("_")[0]
            assert (training["learning_rate"], training["weight_decay"]) == rates[task.name]
            assert training.get("freeze", "none") == ("encoder" if row.name.endswith("noFT") else "none")
            assert training["train_metrics"] == "running"
            head = task.head_options
            dropouts = [head.get("dropout"), *head.get("dropouts", []), task.sentence_dropout]
            assert {rate for rate in dropouts if rate} == {0.5}


def test_report_001_borrows_quora_for_sts_and_changes_nothing_else():
    with_quora, plain = (run_of("reports/001/table_3", name) for name in ("Siamese-FF FT with Quora", "Siamese-FF FT"))
    assert differences(with_quora, plain) == {"tasks": True}
    (task,), (without,) = with_quora[2], plain[2]
    assert replace(task, sources=()) == without
    assert task.sources == (Source(task="para", mapping="paraphrase_to_score"),)  # section 3.3; tests/data has values


def test_each_row_of_report_002_adds_to_another_what_its_name_says():
    sampled = {"rows_per_epoch": {"para": 0.1}, "redraw_rows": False}  # section 3.2
    surgery = {"aggregator": "pcgrad", "aggregator_options": {"reduction": "mean"}, "per_device_train_batch_size": 5}
    smart = {
        "regularizer": "smart", "smart_form": "smart-pytorch", "smart_variant": "smart_0", "smart_weight": 1.0,
        "smart_step_size": 1e-3, "smart_epsilon": 1e-6, "smart_noise_std": 1e-5, "smart_steps": 1, "proximal": "none",
    }  # fmt: skip
    sampling, cross, both = "Random Sampling Baseline", "Cross-Encoding", "PCGrad + SMART"
    added = {
        (sampling, "Baseline"): sampled,
        ("SMART", sampling): smart,
        ("PCGrad", sampling): surgery,
        (both, "PCGrad"): smart,
        (cross, sampling): {"tasks": True},
        (f"{cross} + {both} 0", cross): surgery | smart,
        (f"{cross} + {both} 0", both): {"tasks": True},
        (f"{cross} + {both} 1", f"{cross} + {both} 0"): {
            "smart_variant": "smart_1", "smart_score_divergence": "bernoulli",
        },
        (f"{cross} + {both} 2", f"{cross} + {both} 1"): {"smart_variant": "smart_2"},
        ("SMART with the proximal term", "SMART"): {
            "proximal": "previous", "proximal_weight": 1.0, "proximal_steps": 10,
        },
        (f"{both} with 5 epochs", both): {"num_train_epochs": 5},
        (f"{both} with additional data", both): {"per_device_train_batch_size": 3, "tasks": True},
        (f"{both} with SICK", both): {"tasks": True},
    }  # fmt: skip
    assert {name for pair in added for name in pair} == {row.name for row in STUDIES["reports/002/table_1"].rows}
    for (name, other), keys in added.items():
        assert differences(*(run_of("reports/002/table_1", row) for row in (name, other))) == keys, name
    tasks = {task.name: task for task in run_of("reports/002/table_1", f"{both} with additional data")[2]}
    mappings = {name: [source.mapping for source in task.sources] for name, task in tasks.items() if task.sources}
    assert mappings == {"sst": ["stars_to_classes"], "sts": ["nli_to_score"]}  # section 3.5


def test_the_rows_of_report_003_are_the_stages_in_their_names():
    models = {"ConcatA": ("bi", "linear"), "ConcatB": ("cross", "linear"), "ConcatB + AL": ("cross", "mlp")}
    parts = {"MultiNLI": "nli", "SICK": "nli", "GS_bd": "surgery", "GS_w": "surgery", "FL": "heads"}
    surgery = {"GS_bd": ("once", "unconditional", "inverse_batch_size"), "GS_w": ("cycle", "unconditional", None)}
    first: dict[tuple[str, str], Read] = {}
    for row in STUDIES["reports/003/table_1"].rows[1:]:
        model = max((model for model in models if row.name.startswith(f"{model} ")), key=len)
        names = row.name.removeprefix(f"{model} ").split(" + ")
        stages = runs("reports/003/table_1", row.name)
        assert [*stages] == [parts[name] for name in names]
        encoding, head = models[model]
        for name, (_, training, tasks) in zip(names, stages.values(), strict=True):
            pairs = {task.pair_encoding for task in tasks} - {"single"}
            assert pairs == {encoding} and (head in {task.head for task in tasks} or "nli" in stages)
            assert training["num_train_epochs"] == 10 and training["learning_rate"] == 1e-5  # section 5.3
            if name in surgery:
                given = (training["mixing"], training["aggregator"], training.get("task_weights"))
                assert given == surgery[name]
            # Where the stage stands behind others, or in another row, it is the same training.
            alone = first.setdefault((model, name), stages[parts[name]])
            assert same_run(stages[parts[name]], alone), row.name
    sizes = {name: of[1]["per_device_train_batch_size"] for (model, name), of in first.items() if model == "ConcatA"}
    assert sizes == {"GS_bd": 24, "GS_w": 16, "FL": 8, "MultiNLI": 16, "SICK": 16}  # section 5.3
    dataset = {name: of[2][0].dataset for (_, name), of in first.items() if name == "MultiNLI"}
    assert dataset == {"MultiNLI": "nyu-mll/glue"}


def test_the_batches_of_report_003_are_those_it_states_and_small_ones_in_its_ratio():
    sizes = proportional_batch_sizes({"sst": 8544, "para": 141_506, "sts": 6041}, 24)
    assert sizes == {"sst": 1, "para": 24, "sts": 1}  # section 5.3
    assert inverse_batch_size_weights(sizes) == {"sst": 1, "para": 1 / 24, "sts": 1}  # equation 7
    assert proportional_batch_sizes({"sst": 8544, "para": 14_150, "sts": 6040}, 32) == {
        "sst": 19,
        "para": 32,
        "sts": 14,
    }


def test_the_seven_versions_of_report_004_build_on_each_other():
    read = [run_of("reports/004/table", row.name) for row in STUDIES["reports/004/table"].rows]
    steps = [differences(later, earlier) for earlier, later in zip(read, read[1:], strict=False)]
    surgery = {"aggregator": "pcgrad", "aggregator_options": {"reduction": "sum"}}  # section 4.6, algorithm 1
    together = {
        "train_tasks": None, "mixing": "once", "task_weights": {"sst": 1.0, "para": 1.0, "sts": 1.0},
        "num_train_epochs": 1, "metric_for_best_model": "eval_overall",
    }  # fmt: skip
    assert steps == [{"tasks": True}, {"tasks": True}, together, surgery, {"mixing": "cycle"}, {"tasks": True}]
    assert [{task.name: task.head for task in tasks}["sts"] for *_, tasks in read] == 2 * ["linear"] + 5 * ["cosine"]


# ---- Comparisons that no report has


def test_comparisons_differ_from_their_reference_in_what_their_names_say():
    rates = {"5e-5": 5e-5, "1e-4": 1e-4, "2e-4": 2e-4}
    keys = {"sum": "sum", "pcgrad": "pcgrad", "gradvac": "gradvac", "upgrad": "torchjd.UPGrad"}
    study = "comparisons/aggregators"
    assert len(COMPARISONS[study].rows) == 16
    for row in COMPARISONS[study].rows:
        name, rate, *weighted = row.name.split(" ")
        _, training, _ = run_of(study, row.name)
        assert (training["aggregator"], training["learning_rate"]) == (keys[name], rates[rate])
        assert ("task_weights" in training) == bool(weighted)
        if row.name != "sum 1e-4":
            other = COMPARISONS[study].against[row.name]
            assert other == ("sum 1e-4" if name == "sum" and not weighted else f"sum {rate}")
            assert len(differences(run_of(study, row.name), run_of(study, other))) == 1
    study = "comparisons/regularizers"
    for row in COMPARISONS[study].rows[1:]:
        name, *step = row.name.split(" ")
        expected = {"regularizer": name} | ({"fgm_epsilon": float(step[0])} if step else {})
        assert differences(run_of(study, row.name), run_of(study, "none")) == expected
    study = "comparisons/adapters"
    assert COMPARISONS[study].against == {"lora": "full", "lora pcgrad": "lora"}
    assert differences(run_of(study, "lora pcgrad"), run_of(study, "lora")) == {"aggregator": "pcgrad"}
    full, lora = run_of(study, "full"), run_of(study, "lora")
    assert differences(lora, full) == {"learning_rate": 4e-3} and (full[0].peft, lora[0].peft["r"]) == (None, 8)


@pytest.mark.parametrize("study", COMPARISONS)
def test_comparisons_are_of_the_courses_recipes_and_tell_their_command(study):
    read = COMPARISONS[study]
    assert all(row.recipe.startswith("cs224n/") for row in read.rows if row.is_trained) and len(read.seeds) == 3
    assert not study_module.same_trainings(study_module.runs_of(read, Path("root")))
    text = packaged_studies()[study].read_text(encoding="utf-8")
    assert f"#   minbert study {study} --jobs 8 data_dir=$CS224N_DATA model_name_or_path=$MINILM\n" in text


@pytest.mark.parametrize("study", packaged_studies())
def test_the_columns_and_claims_of_a_study_are_metrics_of_its_runs(study, six_layers, tmp_path):
    words = [f"model_name_or_path={six_layers}", "max_length=64", "use_cpu=true"]
    read = read_study(study, words=words)
    runs = study_module.begin(read, tmp_path / "study")
    assert len(runs) == len(read.seeds) * sum(row.is_trained for row in read.rows)


# ---- That they run


@pytest.mark.parametrize(
    ("study", "row"),
    [
        ("reports/000/table_2", "BERT-FPT"),
        ("reports/000/table_3", "Conflicts at 1e-3"),
        ("reports/001/table_3", "Siamese-FF FT with Quora"),
        ("reports/002/table_1", "SMART with the proximal term"),
        ("reports/002/table_1", "PCGrad + SMART with SICK"),
        ("reports/003/table_1", "ConcatA SICK + GS_bd + FL"),
        ("comparisons/aggregators", "upgrad 1e-4"),
        ("comparisons/aggregators", "sum 1e-4 weighted"),
        ("comparisons/regularizers", "r_drop"),
        ("comparisons/adapters", "lora pcgrad"),
    ],
)
def test_a_row_trains_and_has_its_columns(study, row, tiny_bert, write_course_files, tmp_path):
    data = write_course_files(tmp_path / "data")
    names = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"
    labels = ("NEUTRAL", "ENTAILMENT", "CONTRADICTION")
    lines = [f"{n}\tone dog runs {n}\ta cat sleeps {n}\t4.5\t{labels[n % 3]}" for n in range(9)]
    (data / "sick-train.tsv").write_text("\n".join([names, *lines]) + "\n", encoding="utf-8")
    words = {
        "model_name_or_path": tiny_bert, "data_dir": data, "output_dir": tmp_path / "run", "max_length": 64,
        "max_steps": 1, "per_device_train_batch_size": 8, "use_cpu": "true", "rows_per_epoch": "null",
    }  # fmt: skip
    read = {**STUDIES, **COMPARISONS}[study]
    changed = with_words(read, [f"{key}={value}" for key, value in words.items()])
    metrics = train(changed.recipe(changed.row(row)))
    assert metrics == json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))
    columns = read.metrics or ("sst_accuracy", "para_accuracy", "sts_pearson", "overall")
    assert {name if name.startswith("train_") else f"eval_{name}" for name in columns} <= {*metrics}
    if "Conflicts" in row:
        assert metrics["train_shared_tensors"] == 5 + 16 * 2
        assert 0 <= metrics["train_tensor_conflicts"] <= 6 * metrics["train_shared_tensors"]


# ---- The page of results

PAGE = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "results_page.py"))


def test_the_page_of_results_is_what_the_script_writes():
    written = (recipes_folder() / "results" / "README.md").read_text(encoding="utf-8")
    assert written == PAGE["page"](), "Run: python scripts/results_page.py"
    assert PAGE["README"].read_text(encoding="utf-8") == PAGE["readme"](written), "Run: python scripts/results_page.py"


@pytest.fixture
def claimed(tmp_path) -> Study:
    path = tmp_path / "s.study.yaml"
    path.write_text("""
rows:
  a: {recipe: cs224n/baseline, reported: {overall: 0.5}}
  b: {recipe: cs224n/baseline, reported: {overall: 0.6}}
  c: {recipe: cs224n/baseline, reported: {overall: 0.7}, against: b}
  d: {not_run: no data}
claims:
  - {says: B beats a., row: b, metrics: [overall]}
  - {says: C beats b., row: c, metrics: [overall]}
  - {says: D as a., row: d, metrics: [overall], within: 0.01}
""")
    return read_study(path)


def stored(row: str, **changed) -> dict:
    line = {"row": row, "metric": "overall", "n": 3, "difference": 0.1, "low": 0.05, "high": 0.15, "p": 0.001}
    line |= {"p_holm": 0.002, "verdict": "higher", "claim": "holds", "reported_difference": 0.1}
    return line | changed


def test_claims_are_judged_by_stored_differences_of_the_same_two_rows(claimed):
    def said(*lines):
        found = PAGE["_judge"]("s", claimed, {"reference": "a", "differences": lines}, {})
        return [each.said for each in found]

    assert said() == ["not measured yet", "not measured yet", "not run: no data"]
    assert said(stored("b"), stored("c"))[:2] == ["holds", "not measured yet"]  # without `against`: the reference
    assert said(stored("c", against="a"))[1] == "not measured yet"
    smaller = stored("c", against="b", verdict="cannot be told", high=0.09, low=-0.01, p_holm=0.2)
    assert said(smaller)[1] == "not as large"
    assert said({**smaller, "high": 0.11})[1] == "cannot be told"
    assert said(stored("b", difference=None, p_holm=None, verdict="", claim="not run"))[0] == "not measured yet"
    same = stored("b", difference=None, p_holm=None, verdict="the same training", claim="the same training")
    assert said(same)[0] == "the same training"


def test_a_table_has_a_line_for_each_row_with_what_can_be_told_and_conflicts(claimed):
    lines = [stored("a", against=None, verdict="", mean=0.6, sd=0.02, reported=0.5)]
    lines += [stored("c", against="b", mean=0.7, sd=0.01, reported=None)]
    row = {"seeds": [1, 2, 3], "seconds": 12.4, "missing": [], "note": ""}
    rows = [{**row, "row": "a", "conflicts": {}}, {**row, "row": "c", "conflicts": {"x_y": 0.4, "x_z": 0.5}}]
    made = {"seeds": [1, 2, 3], "devices": ["a card"], "selection": [], "rows": rows, "differences": lines}
    made |= {"reference": "a", "source": "there", "scores": {"overall": {"a": [1], "c": [2]}}}
    written = "\n".join(PAGE["_table"]("comparisons/some", claimed, made)).splitlines()
    assert "| a |  | 3 | 0.600 ± 0.020 (0.500) | 12 s |  |" in written
    assert "| c | b | 3 | 0.700 ± 0.010 + | 12 s | 45.0% |" in written
    assert "not run yet." in "".join(PAGE["_table"]("comparisons/some", claimed, None))


def test_a_report_has_a_line_for_each_claim_that_was_measured_and_sentences_for_the_others(claimed):
    judged = [*PAGE["_judge"]("s", claimed, {"reference": "a", "differences": [stored("b")]}, {})]
    text = "\n".join(PAGE["_claims"](judged))
    line = "| B beats a. | b | a | overall | +0.100 | +0.100 | +0.050 to +0.150 | 0.002 | 3 | **holds** |"
    assert line in text.splitlines()
    assert (
        "Not measured yet:\n\n- C beats b. (c against b: overall)" in text and "Not run: no data:\n\n- D as a." in text
    )
    counts = [*PAGE["_counts"]({"Report 000": judged})]
    assert "| Report 000 | 3 | 1 | 0 | 0 | 0 | 2 |" in counts


def test_a_claim_on_two_rows_that_are_one_training_is_not_judged(claimed):
    record = stored("b")
    (line, *_) = PAGE["_judge"]("s", claimed, {"reference": "a", "differences": [record]}, {"b": "a"})
    assert (line.claim.row, line.against, line.said) == ("b", "a", "the same training")
    assert "Random Sampling Baseline" in PAGE["_one"]("reports/002/table_1")


def test_notes_are_said_once_and_the_rows_that_most_are_not_named():
    rows = [{"row": f"row {n}", "seeds": [1] * (n > 1), "note": "n." * (n > 1), "missing": []} for n in range(5)]
    for row in rows[:2]:
        row["missing"] = ["not run: no data"]
    scores = {"m": {f"row {n}": [{"seed": 1, "score": 0.5 if n > 2 else 0.1 * n}] for n in range(5)}}
    assert "".join(PAGE["_notes"]({"rows": rows, "scores": scores})).splitlines() == [
        "", "- row 0, row 1: not run: no data.", "- row 2, row 3, row 4: n.",
        "- row 4: each seed has the scores of row 3: what differs between the two had no effect when they ran.",
    ]  # fmt: skip
    selection = ["row 2, row 3: best.", "row 4: last."]
    assert PAGE["_selection"]({"rows": rows, "selection": selection}) == ["row 4: last.", "All other rows: best."]

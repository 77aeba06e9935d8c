"""The config: tasks and the active task, however they are given, and every field through a file."""

import pytest
from transformers import AutoConfig, PreTrainedConfig

from hf_minbert import TASKS, MinBertConfig, Task, get_tasks

THREE = ["sst", "para", "sts"]
SHOWN = {  # what a tool that knows one task sees
    "sst": (5, "very negative", "single_label_classification"),
    "para": (2, "not duplicate", "single_label_classification"),
    "sts": (1, "sts", "regression"),
    None: (2, "LABEL_0", None),
}


X = {"name": "x", "kind": "classes", "labels": ["a", "b"], "head": "linear"}


def shown(config):
    assert config.label2id == {label: index for index, label in config.id2label.items()}
    return config.num_labels, config.id2label[0], config.problem_type


def test_it_needs_no_arguments_and_prints():
    config = MinBertConfig()
    assert "minbert" in repr(config)
    assert (config.tasks, config.task_names, config.active_task) == (None, [], None)


def test_every_field_survives_the_file(tmp_path):
    changed = {
        "vocab_size": 91,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "hidden_act": "relu",
        "hidden_dropout_prob": 0,
        "attention_probs_dropout_prob": 0.25,
        "max_position_embeddings": 16,
        "type_vocab_size": 3,
        "family": "electra",
        "position_offset": 1,
        "embedding_size": 12,
        "attention_output_dropout": False,
        "word_head_act": "gelu",
        "initializer_range": 0.5,
        "layer_norm_eps": 1e-5,
        "pad_token_id": None,
        "bos_token_id": 7,
        "eos_token_id": 8,
        "sep_token_id": 9,
        "classifier_dropout": 0.0,
        "tie_word_embeddings": False,
        "tasks": get_tasks(["sts", "sst"]),
        "active_task": "sst",
        "private_layers": 2,
        "private_owner": "sst",
        "max_input_length": {"sts": 12, "sst": 8},
        "plugins": ["my_heads"],
    }
    # Private encoders do not go with private layers, nor does an encoder of the library's: each has a test of its own.
    assert {*changed, "private_encoders", "encoder_config"} == set(MinBertConfig.__annotations__)
    config = MinBertConfig(**changed)
    config.save_pretrained(tmp_path)
    loaded = MinBertConfig.from_pretrained(tmp_path)
    for name in changed:
        assert getattr(loaded, name) == getattr(config, name) != getattr(MinBertConfig(), name), name
    assert [Task.from_config(task) for task in loaded.tasks] == [
        Task(**{**vars(TASKS[name]), "files": {}}) for name in ("sts", "sst")
    ]


def test_private_encoders_survive_the_file(tmp_path):
    MinBertConfig(private_encoders=True).save_pretrained(tmp_path)
    assert MinBertConfig.from_pretrained(tmp_path).private_encoders


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"private_layers": 13}, "`private_layers` must be from 0 to 12.*Found 13"),
        ({"private_layers": -1}, "`private_layers` must be from 0 to 12.*Found -1"),
        ({"private_owner": "para", "tasks": get_tasks(["sst"])}, "`tasks` must keep 'para'.*Found sst"),
        ({"private_layers": 1, "private_encoders": True}, "`private_encoders` leaves no layer to share"),
    ],
)
def test_impossible_sharing_is_refused(given, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        MinBertConfig(**given)
    MinBertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        MinBertConfig.from_pretrained(tmp_path, **given)


def test_what_an_entry_of_tasks_leaves_out_is_what_a_task_leaves_out():
    said = {"name": "mood", "kind": "binary", "labels": ["no", "yes"], "head": "linear"}
    task = Task(name="mood", kind="binary", labels=("no", "yes"), text_columns=("text",)).to_config()
    (entry,) = MinBertConfig(tasks=[said]).tasks
    assert entry == {key: value for key, value in task.items() if key in entry}
    assert set(task) - set(entry) == {"text_columns", "label_column", "metric"}  # nothing that the model needs


@pytest.mark.parametrize("order", [THREE, THREE[::-1]])
def test_the_order_of_tasks_survives_the_file(tmp_path, order):
    MinBertConfig(tasks=get_tasks(order)).save_pretrained(tmp_path)
    assert MinBertConfig.from_pretrained(tmp_path).task_names == order


def test_tasks_may_be_given_as_dicts():
    tasks = get_tasks(THREE)
    expected = MinBertConfig(tasks=tasks).tasks
    assert MinBertConfig(tasks=[task.to_config() for task in tasks]).tasks == expected
    tuples = [{**task.to_config(), "labels": task.labels, "text_columns": task.text_columns} for task in tasks]
    assert MinBertConfig(tasks=tuples).tasks == expected


@pytest.mark.parametrize("load", [MinBertConfig.from_pretrained, AutoConfig.from_pretrained])
@pytest.mark.parametrize("saved", [None, *THREE])
@pytest.mark.parametrize("wanted", [None, *THREE])
def test_the_active_task_asked_for_at_loading_wins(tmp_path, load, saved, wanted):
    MinBertConfig(tasks=get_tasks(THREE), active_task=saved).save_pretrained(tmp_path)
    assert shown(load(tmp_path)) == SHOWN[saved]
    config = load(tmp_path, active_task=wanted)
    assert config.active_task == wanted
    assert shown(config) == SHOWN[wanted]
    config.save_pretrained(tmp_path)
    assert shown(load(tmp_path)) == SHOWN[wanted]


#: Task to what the library's scripts may say of its labels.
AGREEING = {
    "sst": {"num_labels": 5, "problem_type": "single_label_classification"},
    "para": {"num_labels": 2, "id2label": {"0": "not duplicate", "1": "duplicate"}},
    "sts": {"num_labels": 1, "problem_type": "regression", "label2id": {"sts": 0}},
    None: {"num_labels": 2, "problem_type": None},
}


@pytest.mark.parametrize("load", [MinBertConfig.from_pretrained, AutoConfig.from_pretrained])
@pytest.mark.parametrize("active", AGREEING)
def test_labels_that_agree_with_the_active_task_pass(tmp_path, load, active):
    MinBertConfig(tasks=get_tasks(THREE)).save_pretrained(tmp_path)
    config = load(tmp_path, active_task=active, finetuning_task="sst2", **AGREEING[active])
    assert shown(config) == SHOWN[active]


@pytest.mark.parametrize("load", [MinBertConfig.from_pretrained, AutoConfig.from_pretrained])
@pytest.mark.parametrize(
    ("active", "given", "says"),
    [
        ("sst", {"num_labels": 2}, "`num_labels=2` contradicts the active task 'sst', which has 5. Leave it out"),
        ("sts", {"num_labels": 2}, "`num_labels=2` contradicts the active task 'sts', which has 1"),
        ("para", {"id2label": {0: "no", 1: "yes"}}, "`id2label=.*contradicts the active task 'para'"),
        ("para", {"label2id": {"duplicate": 0, "not duplicate": 1}}, "`label2id=.*contradicts the active task"),
        ("para", {"problem_type": "regression"}, "has 'single_label_classification'"),
        ("sst", {"problem_type": "multi_label_classification"}, "contradicts the active task 'sst'"),
        (None, {"num_labels": 5}, "`num_labels=5` is of one task, and none is active.*`active_task=`: sst, para, sts"),
    ],
)
def test_labels_that_contradict_the_active_task_are_refused_when_a_model_is_made(tmp_path, load, active, given, says):
    """Not before: the same config may then be loaded with `ignore_mismatched_sizes=True`."""
    MinBertConfig(tasks=get_tasks(THREE)).save_pretrained(tmp_path / "tasks")
    MinBertConfig().save_pretrained(tmp_path / "plain")
    configs = [
        load(tmp_path / "tasks", active_task=active, **given),
        load(tmp_path / "plain", tasks=get_tasks(THREE), active_task=active, **given),
        load(tmp_path / "tasks", active_task=active),
    ]
    for name, value in given.items():
        setattr(configs[-1], name, value)
    for config in configs:
        for _ in range(2):
            with pytest.raises(ValueError, match=says):
                config.check_tasks()  # as a model does
        config.set_active_task(active)
        assert shown(config) == SHOWN[active]
        config.check_tasks()


@pytest.mark.parametrize(
    ("active", "given", "kind", "labels"),
    [
        ("sst", {"num_labels": 3}, "classes", ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ("sst", {"num_labels": 2, "id2label": {1: "yes", 0: "no"}}, "classes", ["no", "yes"]),
        ("para", {"label2id": {"yes": 1, "no": 0}}, "binary", ["no", "yes"]),
        ("para", {"num_labels": 3}, "classes", ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ("sts", {"num_labels": 2, "problem_type": "single_label_classification"}, "classes", ["LABEL_0", "LABEL_1"]),
    ],
)
def test_labels_for_a_new_head_are_the_active_tasks(tmp_path, active, given, kind, labels):
    MinBertConfig(tasks=get_tasks(THREE)).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, active_task=active, ignore_mismatched_sizes=True, **given)
    task = Task.from_config(config.get_task(active))
    assert (task.kind, list(task.labels)) == (kind, labels)
    assert [*config.id2label.values()] == labels and config.problem_type == "single_label_classification"
    saved = get_tasks(THREE)
    assert [Task.from_config(of) for of in config.tasks if of["name"] != active] == [
        Task.from_config(of.to_config()) for of in saved if of.name != active
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_labels": 1}, "`num_labels=1` contradicts the active task 'sst', which has 5"),
        ({"problem_type": "multi_label_classification"}, "which has 'single_label_classification'"),
        ({"problem_type": "regression", "num_labels": 3}, "`num_labels=3` contradicts .* which has 5"),
    ],
)
def test_labels_that_no_task_can_have_are_refused_for_a_new_head_too(tmp_path, given, says):
    MinBertConfig(tasks=get_tasks(["sst"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says):
        AutoConfig.from_pretrained(tmp_path, ignore_mismatched_sizes=True, **given)


@pytest.mark.parametrize("new_head", [False, True])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"num_labels": 3, "id2label": {0: "a", 1: "b"}},
            "`num_labels=3` contradicts the 2 labels that are given with it, 'a', 'b'. Leave it out",
        ),
        ({"num_labels": 2, "label2id": {"a": 0}}, "contradicts the 1 labels that are given with it, 'a'"),
        (
            {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 1, "b": 0}},
            "`id2label=.*` and `label2id=.*` contradict each other",
        ),
        (
            {"id2label": {i: str(i) for i in range(5)}, "label2id": {"0": 0, "1": 1}},
            "`label2id={'0': 0, '1': 1}` contradict each other",
        ),
    ],
)
def test_labels_that_contradict_each_other_are_refused_at_once(tmp_path, given, says, new_head):
    MinBertConfig(tasks=get_tasks(["sst"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says):
        AutoConfig.from_pretrained(tmp_path, ignore_mismatched_sizes=new_head, **given)


def test_a_part_of_the_labels_is_compared_with_those_of_the_task(tmp_path):
    MinBertConfig(tasks=get_tasks(["sst"])).save_pretrained(tmp_path)
    part = {"very negative": 0, "negative": 1}
    with pytest.raises(ValueError, match="`label2id={.*1}` contradicts .* which has {'very negative': 0, .*: 4}"):
        AutoConfig.from_pretrained(tmp_path, label2id=part).check_tasks()
    config = AutoConfig.from_pretrained(tmp_path, label2id=part, ignore_mismatched_sizes=True)
    assert config.get_task("sst")["labels"] == [*part]


def test_another_task_or_other_tasks_are_no_contradiction():
    config = MinBertConfig(tasks=get_tasks(THREE), active_task="sst")
    config.active_task = "para"
    config.check_tasks()
    assert shown(config) == SHOWN["para"]
    config.tasks = get_tasks(["sts"])
    config.active_task = None
    config.check_tasks()
    assert shown(config) == SHOWN["sts"]
    config.rearrange(tasks=None)
    config.num_labels = 3  # a plain encoder's say nothing of tasks
    config.check_tasks()
    assert config.num_labels == 3


def test_what_the_labels_were_is_not_saved(tmp_path):
    config = MinBertConfig(tasks=get_tasks(THREE), active_task="sst")
    assert not [name for name in config.to_dict() if name.startswith("_der")]
    config.save_pretrained(tmp_path)
    assert "_derived" not in (tmp_path / "config.json").read_text()
    assert MinBertConfig.from_pretrained(tmp_path).id2label == config.id2label


def test_a_single_task_is_active():
    config = MinBertConfig(tasks=get_tasks(["sts"]))
    assert config.active_task == "sts"
    config.set_active_task(None)
    assert shown(config) == SHOWN["sts"]


def test_tasks_given_at_loading_leave_a_saved_active_task_behind(tmp_path):
    MinBertConfig(tasks=get_tasks(["sst"])).save_pretrained(tmp_path)
    config = MinBertConfig.from_pretrained(tmp_path, tasks=get_tasks(["para", "sts"]))
    assert config.task_names == ["para", "sts"]
    assert shown(config) == SHOWN[None]


@pytest.mark.parametrize("tasks", ["sst", ["sst"], {"sst": TASKS["sst"]}, TASKS["sst"]])
def test_names_and_a_lone_task_are_no_list_of_tasks(tmp_path, tasks):
    MinBertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`tasks` must be a list of tasks, as `hf_minbert.get_tasks` gives it"):
        MinBertConfig.from_pretrained(tmp_path, tasks=tasks)


def test_an_encoder_without_tasks_keeps_its_labels():
    assert MinBertConfig(id2label={0: "yes", 1: "no", 2: "maybe"}).num_labels == 3


def test_unused_arguments_come_back(tmp_path):
    MinBertConfig(tasks=get_tasks(THREE)).save_pretrained(tmp_path)
    config, unused = MinBertConfig.from_pretrained(tmp_path, active_task="sts", other=1, return_unused_kwargs=True)
    assert (config.active_task, unused) == ("sts", {"other": 1})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tasks": THREE[:1] * 2}, "'sst' twice"),
        ({"tasks": THREE, "active_task": "stss"}, "'stss'.*sst, para, sts"),
        ({"active_task": "sst"}, "'sst'.*no tasks"),
        ({"tasks": [{"name": "x"}]}, "lacks 'kind'"),
        (
            {"tasks": [{"name": "x", "kind": "class", "labels": [], "head": "linear"}]},
            "'x'.*classes, binary, .*score.*'class'",
        ),
        ({"tasks": [{**X, "head": ["linear"]}]}, r"'x': `head` must be text. Found \['linear'\]"),
        ({"tasks": [{**X, "pooling": None}]}, "'x': `pooling` must be text. Found None"),
        ({"tasks": [{**X, "loss": {"bce": {}}}]}, "'x': `loss` must be text. Found {'bce': {}}"),
        ({"tasks": [{**X, "range": [0, 5]}]}, r"'x': `range` is for a score, and `kind` is classes. Found \[0, 5\]"),
    ],
)
def test_faults_are_named(fields, says):
    if "tasks" in fields:
        fields = {
            **fields,
            "tasks": [TASKS.get(task, task) if isinstance(task, str) else task for task in fields["tasks"]],
        }
    with pytest.raises(ValueError, match=says):
        MinBertConfig(**fields)


def write(folder, **config):
    class Other(PreTrainedConfig):
        model_type = config.pop("model_type")

    Other(**config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "t5"}, "'t5'"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "'relative_key'"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder"),
    ],
)
def test_checkpoints_that_would_load_and_mean_something_else_are_refused(tmp_path, config, says):
    write(tmp_path, **config)
    with pytest.raises(ValueError, match=says):
        MinBertConfig.from_pretrained(tmp_path)


def test_the_config_of_a_bert_becomes_ours_without_a_warning(tmp_path, caplog):
    write(tmp_path, model_type="bert", hidden_size=48, position_embedding_type="absolute", use_cache=True)
    config = MinBertConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.hidden_size) == ("minbert", 48)
    assert "use_cache" not in config.to_dict()
    assert not caplog.records

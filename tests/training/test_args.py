"""Training arguments: which stock ones are refused, which are honoured, and what ours accept."""

import pickle
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
import torch
from accelerate.utils import ParallelismConfig
from transformers import TrainingArguments

from hf_minbert import MinBertError, MultiTaskTrainingArguments
from hf_minbert.settings.dotted import Value
from hf_minbert.settings.recipe import cast
from hf_minbert.settings.stock import REFUSED
from hf_minbert.settings.stock import STOCK as TRAITS_OF_STOCK
from hf_minbert.training import unsupported_arguments
from hf_minbert.training.distributed import warn_about_idle_gpus, warn_about_mps

STOCK = {field.name for field in fields(TrainingArguments)}

#: A value that each refused argument could be given.
REFUSED_VALUES = {
    "label_smoothing_factor": 0.1,
    "train_sampling_strategy": "group_by_length",
    "dataloader_drop_last": True,
    "dataloader_persistent_workers": True,
    "dataloader_in_order": False,
    "include_num_input_tokens_seen": "all",
    "auto_find_batch_size": True,
    "batch_eval_metrics": True,
    "eval_do_concat_batches": False,
    "include_for_metrics": ["inputs"],
    "prediction_loss_only": True,
    "remove_unused_columns": True,
    "label_names": ["labels"],
    "length_column_name": "size",
    "use_cache": True,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "torch_empty_cache_steps": 2,
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 5,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "average_tokens_across_devices": False,
    "fsdp": True,
    "fsdp_config": {"min_num_params": 1},
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "parallelism_config": ParallelismConfig(),
    "local_rank": 0,
    "do_train": True,
    "do_predict": True,
}
#: Some value of every other stock argument that is not its default.
HONOURED_VALUES = {
    "output_dir": "elsewhere",
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 3,
    "num_train_epochs": 0.5,
    "max_steps": 7,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 1},
    "warmup_steps": 0.1,
    "optim": "adafactor",
    "optim_args": "a=1",
    "optim_target_modules": "all-linear",
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.0,
    "bf16": True,
    "bf16_full_eval": True,
    "tf32": False,
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "default",
    "neftune_noise_alpha": 5.0,
    "logging_strategy": "epoch",
    "logging_steps": 3,
    "logging_first_step": True,
    "log_on_each_node": False,
    "logging_nan_inf_filter": False,
    "log_level": "error",
    "log_level_replica": "error",
    "disable_tqdm": True,
    "report_to": ["kubeflow"],  # which needs no library
    "run_name": "name",
    "project": "project",
    "trackio_space_id": "space",
    "trackio_bucket_id": "bucket",
    "trackio_static_space_id": "space",
    "eval_strategy": "steps",
    "eval_steps": 3,
    "eval_delay": 2,
    "eval_on_start": True,
    "eval_use_gather_object": True,
    "eval_accumulation_steps": 2,
    "save_only_model": True,
    "save_strategy": "best",
    "save_steps": 3,
    "save_on_each_node": True,
    "save_total_limit": 2,
    "enable_jit_checkpoint": True,
    "push_to_hub": True,
    "hub_token": "token",
    "hub_private_repo": True,
    "hub_model_id": "me/model",
    "hub_strategy": "end",
    "hub_always_push": True,
    "hub_revision": "branch",
    "metric_for_best_model": "sts_pearson",
    "greater_is_better": False,
    "ignore_data_skip": True,
    "restore_callback_states_from_checkpoint": False,
    "full_determinism": True,
    "seed": 0,
    "data_seed": 3,
    "use_cpu": True,
    "accelerator_config": {"non_blocking": True},
    "dataloader_num_workers": 2,
    "dataloader_pin_memory": False,
    "dataloader_multiprocessing_context": "spawn",
    "ddp_timeout": 60,
    "debug": "underflow_overflow",
    "skip_memory_metrics": False,
    "resume_from_checkpoint": True,
}
#: These need another argument beside them, a GPU, or several processes.
NOT_ALONE = {
    "load_best_model_at_end",
    "dataloader_prefetch_factor",
    "fp16",
    "fp16_full_eval",
    "do_eval",
    "ddp_backend",
}


def arguments(**given):
    return MultiTaskTrainingArguments(**{"output_dir": "run", "use_cpu": True, **given})


def test_every_stock_argument_is_decided_on():
    """A new version's argument must be tried against our loop before it joins one of the lists."""
    assert REFUSED_VALUES.keys() == REFUSED.keys()
    assert not HONOURED_VALUES.keys() & REFUSED.keys()
    assert STOCK - REFUSED.keys() - HONOURED_VALUES.keys() - NOT_ALONE == set()
    assert STOCK - REFUSED.keys() - TRAITS_OF_STOCK.keys() == set()
    assert not TRAITS_OF_STOCK.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_stock_argument_that_rounds_cannot_honour_is_refused_with_the_reason(name):
    if name not in STOCK:
        pytest.skip(f"this version of transformers has no `{name}`")
    with pytest.raises(MinBertError) as refusal:
        arguments(**{name: REFUSED_VALUES[name]})
    assert f"`{name}:" in str(refusal.value)
    assert REFUSED[name][1] in str(refusal.value)
    assert "Leave it out." in str(refusal.value)


@pytest.mark.parametrize("name", [name for name in REFUSED if name in STOCK])
def test_a_refused_argument_may_be_given_as_it_is_anyway(name):
    arguments(**{name: REFUSED[name][0]})


@pytest.mark.parametrize("name", [name for name in HONOURED_VALUES if name in STOCK])
def test_other_stock_arguments_are_accepted(name):
    value = HONOURED_VALUES[name]
    found = getattr(arguments(**{name: value}), name)
    if name == "debug":
        found = found[0].value
    elif name == "accelerator_config":
        found = {"non_blocking": found.non_blocking}
    assert found == value


@pytest.mark.parametrize("nothing", [False, None, "", [], {}])
def test_asking_for_nothing_is_not_refused(nothing):
    arguments(fsdp=nothing, include_for_metrics=nothing, label_names=nothing, deepspeed=nothing)
    arguments(include_num_input_tokens_seen=False, ddp_find_unused_parameters=False)
    arguments(liger_kernel_config=nothing, fsdp_config=nothing)


def test_arguments_can_be_built_again_from_what_they_became():
    args = arguments(optim="course_adamw", task_sampling={"sst": "balanced"}, eval_strategy="epoch")
    for again in (replace(args), MultiTaskTrainingArguments(**args.to_dict()), pickle.loads(pickle.dumps(args))):
        assert again.to_dict() == args.to_dict()


# ---- ours


@pytest.mark.parametrize("name", ["course_adamw", "adamw_torch", "sgd"])
def test_an_optimizer_of_ours_stands_beside_the_stock_ones(name):
    written = cast("optim", Value(name, name), get_type_hints(MultiTaskTrainingArguments)["optim"])
    for given in (name, written):
        args = arguments(optim=given)
        assert args.optim == args.optim.value == args.to_dict()["optim"] == name


def test_a_misspelt_optimizer_is_answered_with_the_nearest():
    with pytest.raises(MinBertError, match="Unknown optim 'course_adam'. Did you mean 'course_adamw'?"):
        arguments(optim="course_adam")


@pytest.mark.parametrize("rows", [1, 1.0, 0.1, 500])
def test_a_number_of_rows_and_a_share_are_told_apart(rows):
    hint = get_type_hints(MultiTaskTrainingArguments)["rows_per_epoch"]
    found = cast("rows_per_epoch", Value({"para": rows}, None), hint)["para"]
    assert (type(found), found) == (type(rows), rows)
    assert arguments(rows_per_epoch={"para": rows}).rows_per_epoch == {"para": rows}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config.dispatch_batches"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches"),
        ({"accelerator_config": {"even_batches": False}}, "accelerator_config.even_batches"),
        ({"optim": "lomo"}, "`optim: lomo`"),
        ({"fp16": True}, "`fp16: true` needs a GPU"),
        ({"do_eval": True}, "Set `eval_strategy`"),
        ({"early_stopping_patience": 2}, "Set `eval_strategy`"),
        ({"mixing": "cycel"}, "Unknown mixing 'cycel'. Did you mean 'cycle'?"),
        ({"aggregator": "pcgard"}, "Unknown aggregator 'pcgard'"),
        ({"regularizer": "smrt"}, "Unknown regularizer 'smrt'"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size` must be at least 1 ... Found 0."),
        ({"per_device_eval_batch_size": 0}, "`per_device_eval_batch_size` must be at least 1 ... Found 0."),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1 ... Found 0."),
        ({"learning_rate": float("nan")}, "`learning_rate` must be at least 0 ... Found nan."),
        ({"weight_decay": -0.1}, "`weight_decay` must be at least 0 ... Found -0.1."),
        ({"data_seed": -1}, "`data_seed` must be at least 0 ... Found -1."),
        ({"num_train_epochs": 0}, "`num_train_epochs` must be more than 0 ... Found 0."),
        (
            {"early_stopping_patience": 0, "eval_strategy": "epoch"},
            "`early_stopping_patience` must be at least 1 ... Found 0.",
        ),
        ({"task_batch_sizes": {"sst": 0}}, "`task_batch_sizes` of 'sst' must be a whole number from 1. Found 0."),
        ({"task_batch_sizes": {"sst": 2.5}}, "Found 2.5."),
        ({"task_batch_sizes": {"sst": True}}, "Found True."),
        ({"task_batch_sizes": "proportionate"}, "Unknown task_batch_sizes 'proportionate'. ... 'proportional'?"),
        ({"task_weights": "inverse_batch"}, "Unknown task_weights 'inverse_batch'. ... 'inverse_batch_size'?"),
        ({"task_weights": {"sst": -1}}, "`task_weights` of 'sst' must be a number from 0. Found -1."),
        ({"task_weights": {"sst": float("nan")}}, "Found nan."),
        ({"task_weights": {"sst": "2"}}, "`task_weights` of 'sst' must be a number from 0. Found '2'."),
        ({"task_weights": {"sst": None}}, "`task_weights` of 'sst' must be a number from 0. Found None."),
        ({"task_weights": {"sst": True}}, "`task_weights` of 'sst' must be a number from 0. Found True."),
        ({"task_weights": 2.0}, "`task_weights` must be a mapping ... or 'inverse_batch_size' or ... Found 2.0."),
        ({"task_weights": "dwa", "task_weights_options": 2}, "`task_weights_options` must be a mapping ... Found 2."),
        (
            {"task_weights": "dwa", "mixing": "once"},
            "`task_weights: dwa` ... Found `mixing: once`. Use `mixing: cycle` or `mixing: shortest`.",
        ),
        ({"task_weights": "imtl_l", "mixing": "annealed"}, "`task_weights: imtl_l` ... Found `mixing: annealed`."),
        ({"task_batch_sizes": 4}, "`task_batch_sizes` must be a mapping ... or 'proportional'. Found 4."),
        ({"task_batch_sizes": ["sst"]}, "`task_batch_sizes` must be a mapping ... Found ['sst']."),
        ({"task_sampling": "balanced"}, "`task_sampling` must be a mapping from tasks. Found 'balanced'."),
        ({"rows_per_epoch": 0.1}, "`rows_per_epoch` must be a mapping from tasks. Found 0.1."),
        ({"mixing": ["once"]}, "`mixing` must be a name. Found ['once']."),
        ({"aggregator": None}, "`aggregator` must be a name. Found None."),
        ({"aggregator": "pcgrad", "aggregator_options": "mean"}, "`aggregator_options` must be ... Found 'mean'."),
        ({"aggregator": "gradvac", "aggregator_options": {"beta": "x"}}, "`beta` must be above 0 ... Found 'x'."),
        ({"aggregator": "pcgrad", "gradient_smoothing": "a"}, "`gradient_smoothing` must be 0 or more ... Found 'a'."),
        ({"aggregator": "pcgrad", "gradient_smoothing": False}, "`gradient_smoothing` must be ... Found False."),
        (
            {"task_sampling": {"sst": "balancd"}},
            "Unknown `task_sampling` of 'sst': 'balancd'. Did you mean 'balanced'?",
        ),
        ({"score_bins": 1}, "`score_bins` must be at least 2 ... Found 1."),
        ({"rows_per_epoch": {"para": 0}}, "`rows_per_epoch` of 'para' must be a whole number ... Found 0."),
        ({"rows_per_epoch": {"para": 0.0}}, "Found 0.0."),
        ({"rows_per_epoch": {"para": 1.5}}, "a share of them above 0 and up to 1.0. Found 1.5."),
        ({"rows_per_epoch": {"para": True}}, "Found True."),
        ({"rows_per_epoch": {"para": "all"}}, "Found 'all'."),
        ({"freeze": "encoders"}, "Unknown freeze 'encoders'. Did you mean 'encoder'?"),
        ({"eval_accumulation_steps": 0}, "`eval_accumulation_steps` must be at least 1 ... Found 0."),
        ({"save_total_limit": 0}, "`save_total_limit` must be at least 1 ... Found 0."),
        ({"logging_steps": -1}, "`logging_steps` must be at least 0 ... Found -1."),
        ({"save_steps": -1}, "`save_steps` must be at least 0 ... Found -1."),
        ({"eval_steps": -0.5}, "`eval_steps` must be at least 0 ... Found -0.5."),
        ({"eval_delay": -1}, "`eval_delay` must be at least 0 ... Found -1."),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_was_found(given, said):
    with pytest.raises(MinBertError) as refusal:
        arguments(**given)
    assert all(part in str(refusal.value) for part in said.split(" ... "))


@pytest.mark.parametrize("key", ["bf16", "bf16_full_eval"])
def test_bf16_without_a_gpu_is_refused_in_words_that_say_what_to_leave_out(key, monkeypatch):
    monkeypatch.setattr(unsupported_arguments, "is_torch_bf16_gpu_available", lambda: False)
    with pytest.raises(MinBertError, match=f"this machine has no GPU that supports bf16. Leave out {key}=true."):
        arguments(**{key: True, "use_cpu": False})
    assert getattr(arguments(**{key: True}), key)  # on the CPU it works


@pytest.mark.parametrize(
    "given",
    [
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"early_stopping_patience": 2, "eval_strategy": "epoch"},
        {"save_strategy": "best", "eval_strategy": "epoch"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    ],
)
def test_what_needs_a_best_metric_takes_the_overall_score(given):
    args = arguments(**given)
    assert args.metric_for_best_model == "eval_overall"
    assert args.greater_is_better
    assert arguments(**given, metric_for_best_model="sts_loss").greater_is_better is False


def test_our_defaults():
    args = arguments()
    assert (args.mixing, args.aggregator, args.regularizer, args.freeze) == ("cycle", "sum", "none", "none")
    assert args.optim == TrainingArguments(output_dir="run").optim
    assert args.task_sampling is args.rows_per_epoch is None
    assert args.train_tasks is args.eval_tasks is args.task_batch_sizes is args.task_weights is None
    assert args.early_stopping_patience is args.metric_for_best_model is None
    assert not args.remove_unused_columns
    assert args.restore_callback_states_from_checkpoint  # else early stopping would forget its count


def test_nothing_is_reported_unless_asked_for():
    assert arguments().report_to == arguments(report_to=None).report_to == arguments(report_to="none").report_to == []
    assert arguments(report_to="kubeflow").report_to == ["kubeflow"]  # which needs no library


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp16_is_refused_without_a_gpu():
    with pytest.raises(MinBertError, match="needs a GPU"):
        arguments(fp16=True, use_cpu=False)


def test_one_process_that_sees_several_gpus_uses_one_and_says_how_to_use_all(monkeypatch, caplog, tmp_path):
    """With more the stock Trainer would wrap the model in DataParallel."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    warn_about_idle_gpus.cache_clear()
    for _ in range(2):  # a run in stages makes arguments for each
        args = MultiTaskTrainingArguments(str(tmp_path))
        assert args.n_gpu == 1 and args.train_batch_size == args.per_device_train_batch_size
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("hf_minbert")]
    assert said.startswith("3 GPUs are visible and one process uses one.")
    assert "accelerate launch --multi_gpu --num_processes 3 scripts/train.py" in said


def test_a_mac_trains_on_its_cpu_and_says_why(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    warn_about_mps.cache_clear()
    assert MultiTaskTrainingArguments(output_dir=str(tmp_path)).device.type == "cpu"
    assert "(MPS) has no float64" in caplog.text
    caplog.clear()
    MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert not caplog.text

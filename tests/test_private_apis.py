"""What the package takes of other libraries that they do not promise to keep: the list, and that it is complete.

`python tests/test_private_apis.py` prints it with the places. To add a use, add a line under the class or module that
has the name; when a use goes, a test says which line is superfluous.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import hf_minbert

PACKAGE = Path(hf_minbert.__file__).parent

#: {class, module or function: {name: why}}. Names with an underscore, that the package overrides, reads or passes.
PRIVATE = {
    "transformers.Trainer": {
        "_clip_grad_norm": "the stock one walks through all parameters, which takes longer than a small step on a GPU",
        "_finish_current_push": "a push at the end waits for the one of the last checkpoint",
        "_get_learning_rate": "called before the schedule moves on: groups' rates are read then",
        "_get_output_dir": "where checkpoints are: the folder of a trial within a search",
        "_get_train_sampler": "pre-training's texts are in an order of their own",
        "_determine_best_metric": "a diverged model is never the best",
        "_load_best_model": "the teacher of `proximal` goes back with the model",
        "_prepare_inputs": "moves a round's batches to the device",
        "_push_from_checkpoint": "during training the same files are pushed as by `minbert publish`",
        "_report_to_hp_search": "an evaluation within a trial of a search may end it",
        "_run_epoch": "the stock one takes a step before it asks whether a resumed run has ended already",
        "_save": "saved training arguments hold no token",
        "_save_checkpoint": "what a run that was cut off left in the folder must not count as this one's",
        "_save_optimizer_and_scheduler": "aggregator and teacher are saved with them",
        "_save_rng_state": "the last file of a checkpoint before older ones are deleted: processes wait here",
    },
    "transformers.Trainer.save_model": {"_internal_call": "saves without a push: the scores are pushed too, later"},
    "transformers.TrainingArguments": {
        "_n_gpu": "the stock Trainer wraps the model in DataParallel where it is above 1",
    },
    "transformers.PreTrainedModel": {
        "_can_record_outputs": "names the layers whose hidden states and attentions are asked for",
        "_from_config": "a new model with another one's attention function",
        "_init_weights": "heads and private layers begin with weights of their own",
        "_keys_to_ignore_on_load_unexpected": "other BERTs' parts, which are not loaded and no cause for a warning",
        "_keys_to_ignore_on_save": "tied weights are not in a checkpoint, and no cause for a warning",
        "_no_split_modules": "layers that stay on one device",
        "_supports_attention_backend": "any attention function of the library works",
        "_supports_flash_attn": "flash attention works",
        "_supports_flex_attn": "flex attention works",
        "_supports_sdpa": "torch's fused attention works",
        "_tied_weights_keys": "the predictor of words has the word embeddings' weights",
    },
    "transformers.PreTrainedConfig": {"_attn_implementation": "which attention function the layers call"},
    "transformers.Pipeline": {
        "_batch_size": "the batch size that the pipeline was made with",
        "_forward": "a step of every pipeline",
        "_forward_params": "what the pipeline was made with, for this step",
        "_load_feature_extractor": "the pipeline needs none",
        "_load_image_processor": "the pipeline needs none",
        "_load_processor": "the pipeline needs none",
        "_load_tokenizer": "the pipeline needs one",
        "_postprocess_params": "what the pipeline was made with, for this step",
        "_preprocess_params": "what the pipeline was made with, for this step",
        "_sanitize_parameters": "a step of every pipeline",
    },
    "accelerate.state.AcceleratorState": {"_reset_state": "each stage of a run may have a precision of its own"},
    "accelerate.state.GradientState": {"_reset_state": "goes with that of AcceleratorState"},
    "evaluate.Metric": {
        "_compute": "a metric of the library `evaluate` is written so",
        "_info": "a metric of the library `evaluate` is written so",
    },
    "torch": {
        "_foreach_add_": "all parameters in a few kernels",
        "_fused_adamw_": "all parameters in one kernel",
        "_foreach_copy_": "all inputs of a CUDA graph in a few kernels",
        "_foreach_lerp_": "all parameters in a few kernels",
        "_foreach_mul_": "all parameters in a few kernels",
    },
    "torch.nn.Module": {
        "_backward_hooks": "a layer is not fused where somebody wants to see what its parts compute",
        "_backward_pre_hooks": "the same",
        "_forward_hooks": "the same",
        "_forward_pre_hooks": "the same",
        "_modules": "a task's submodule by its name, or None, at every step",
    },
}

#: Names without an underscore that no documentation of the library promises, and whose end no import would show.
UNDOCUMENTED = {
    "transformers.Trainer": {
        "call_model_init": "a trial of a search makes a model",
        "compute_objective": "the number that a search looks at",
        "create_accelerator_and_postprocess": "makes the accelerator, which wraps no model in DDP here",
        "current_gradient_accumulation_steps": "how many rounds make a step; an epoch's last one has fewer",
        "get_total_train_batch_size": "rounds have batches of several sizes",
        "hp_space": "the arguments of a trial of a search",
        "model_accepts_loss_kwargs": "says whether losses are scaled to the accumulated batch already",
        "objective": "what a trial of a search came to",
        "push_in_progress": "a push that has not ended when the next one is due",
    },
    "transformers.EarlyStoppingCallback": {
        "early_stopping_patience_counter": "whether a run that resumes had come to its end",
    },
    "transformers.utils.PushInProgress": {"jobs": "pushes that have not ended", "is_done": "whether they have"},
    "transformers.PreTrainedModel": {"all_tied_weights_keys": "weights that a checkpoint has once"},
    "transformers.Pipeline": {"run_single": "the steps of a pipeline for a chunk of inputs"},
    "transformers.models.auto": {"configuration_auto": "when this module is imported, AutoConfig learns of MinBERT"},
    "transformers": {"training_args": "the source of this module says which arguments there are, without an import"},
    "accelerate.Accelerator": {
        "gradient_state": "knows how many rows of the last batch are there twice",
        "prepare_model": "replaced on the instance, so that several processes get no DDP",
        "scaler": "of fp16: all tasks' losses of a step have one scale",
    },
    "accelerate.state.GradientState": {
        "end_of_dataloader": "whether this is the last batch of an evaluation",
        "remainder": "how many rows of the last batch are not there twice",
    },
    "peft.utils.ModulesToSaveWrapper": {"modules_to_save": "a head that was saved whole, when adapters are merged"},
    "torch.Generator": {
        "clone_state": "random numbers that a CUDA graph draws again",
        "graphsafe_get_state": "the same while a CUDA graph is recorded",
        "graphsafe_set_state": "the same while a CUDA graph is recorded",
    },
    "torch.cuda": {"default_generators": "the generator that dropout draws from"},
    "torch.cuda.CUDAGraph": {"register_generator_state": "each replay draws new random numbers"},
}

#: Documented in spite of the underscore: of a named tuple, of `os` and `sys`, and the types' names for checkers alone.
DOCUMENTED = {"_replace", "_exit", "_getframe", "_typeshed"}


# ---- What the package uses


class Names(ast.NodeVisitor):
    """The names of one file.

    Attributes:
        defined: those that it gives to things of its own.
        private: those with an underscore that it reads of an object, passes or imports, with their lines.
        all: every name that occurs, with its lines; strings that spell a path of modules by their parts too.
        of_class: by class, what it defines in its body or on `self`.
    """

    def __init__(self, path: Path):
        self.defined: set[str] = set()
        self.private: list[tuple[str, int]] = []
        self.all: list[tuple[str, int]] = []
        self.of_class: dict[str, set[str]] = {}
        self.classes: list[str] = []
        self.functions = 0
        self.visit(ast.parse(path.read_text(encoding="utf-8")))

    def _define(self, name: str) -> None:
        self.defined.add(name)
        if self.classes:
            self.of_class[self.classes[-1]].add(name)

    def _use(self, name: str, line: int) -> None:
        self.all.append((name, line))
        if name.startswith("_") and not name.startswith("__") and name != "_":
            self.private.append((name, line))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node.name)
        self.classes.append(node.name)
        self.of_class[node.name] = set()
        self.generic_visit(node)
        self.classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._define(node.name)
        self.all.append((node.name, node.lineno))
        self.functions += 1
        self.generic_visit(node)
        self.functions -= 1

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store) and not self.functions:
            self._define(node.id)
            self.all.append((node.id, node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if own and isinstance(node.ctx, ast.Store):
            self._define(node.attr)
            self.all.append((node.attr, node.lineno))
        else:
            self._use(node.attr, node.lineno)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        self._use(node.arg or "_", node.value.lineno)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level:
            for name in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                self._use(name, node.lineno)

    def visit_Import(self, node: ast.Import) -> None:
        for name in (part for alias in node.names for part in alias.name.split(".")):
            self._use(name, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant):
                    self._use(argument.value, node.lineno)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and "\n" not in node.value:
            self.all += [(part, node.lineno) for part in node.value.removesuffix(".py").split(".")]


@cache
def names_by_file() -> dict[str, Names]:
    return {str(path.relative_to(PACKAGE.parent)): Names(path) for path in sorted(PACKAGE.rglob("*.py"))}


def places(name: str) -> list[str]:
    """Where a name occurs, as `file:line`."""
    return [f"{file}:{line}" for file, of in names_by_file().items() for found, line in of.all if found == name]


def foreign_private() -> set[str]:
    """Names with an underscore that the package uses and does not define."""
    used = {name for of in names_by_file().values() for name, _ in of.private}
    return used - {name for of in names_by_file().values() for name in of.defined} - DOCUMENTED


@cache
def own_classes() -> list[type]:
    found = {}
    for module in pkgutil.walk_packages([str(PACKAGE)], "hf_minbert."):
        if not module.name.endswith("__main__"):
            try:
                members = vars(importlib.import_module(module.name))
            except ModuleNotFoundError as error:  # what is optional
                assert not (error.name or "").startswith("hf_minbert"), error
                continue
            found.update({id(c): c for c in members.values() if inspect.isclass(c) and is_own(c)})
    return [*found.values()]


def is_own(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "hf_minbert"


@cache
def names_of(cls: type) -> set[str]:
    """What a class of another library has, declares, and sets on `self` in its methods."""
    own = {*vars(cls), *inspect.get_annotations(cls)}
    try:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))
    except (OSError, TypeError):  # of a builtin one
        return own
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return own.union(n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self")


def overridden() -> Iterator[tuple[type, str]]:
    """Classes of other libraries, and names with an underscore that classes of ours define in their place."""
    for cls in own_classes():
        bases = [base for base in cls.__mro__ if not is_own(base) and base is not object]
        for own in filter(is_own, cls.__mro__):
            file = f"{own.__module__.replace('.', '/')}.py"
            names = names_by_file()[file if file in names_by_file() else file.replace(".py", "/__init__.py")]
            for name in names.of_class.get(own.__name__, ()):
                if name.startswith("_") and not name.startswith("__"):
                    yield from ((base, name) for base in bases if name in names_of(base))


# ---- The list

LISTED = {**UNDOCUMENTED, **{owner: UNDOCUMENTED.get(owner, {}) | names for owner, names in PRIVATE.items()}}
LINES = [(owner, name, why) for owner, names in LISTED.items() for name, why in names.items()]
IDS = [f"{owner}.{name}" for owner, name, _ in LINES]


def is_there(owner: str, name: str) -> bool:
    try:
        thing = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    if inspect.isfunction(thing):
        return name in inspect.signature(thing).parameters
    if inspect.isclass(thing) and any(name in names_of(cls) for cls in thing.__mro__):
        return True
    return hasattr(thing, name) or (inspect.ismodule(thing) and find_spec(f"{owner}.{name}") is not None)


@pytest.mark.parametrize(("owner", "name", "why"), LINES, ids=IDS)
def test_the_library_still_has_it(owner, name, why):
    library = owner.split(".")[0]
    if owner == "torch.cuda.CUDAGraph" and not torch.backends.cuda.is_built():
        pytest.skip("torch is built without CUDA")
    assert is_there(owner, name), (
        f"{owner} has no `{name}` in {library} {version(library)}. It is needed in {', '.join(places(name))}: {why}. "
        f"See how the library does this now, change these lines, and then the list in {Path(__file__).name}."
    )


def test_every_private_name_that_the_package_uses_is_in_the_list():
    listed = {name for names in PRIVATE.values() for name in names}
    missing = {name: places(name) for name in foreign_private() - listed}
    assert not missing, f"Private names of other libraries that are not in PRIVATE, with their places: {missing}"


def test_every_private_name_that_the_package_overrides_is_in_the_list():
    listed = {(pkgutil.resolve_name(owner), name) for owner, names in PRIVATE.items() for name in names}
    missing = {
        f"{base.__module__}.{base.__name__}.{name}": places(name)
        for base, name in overridden()
        if not any(name == known and isinstance(owner, type) and issubclass(owner, base) for owner, known in listed)
    }
    assert not missing, f"Private names that classes of the package override and PRIVATE has not: {missing}"


def test_the_list_has_nothing_that_the_package_does_not_use():
    used = foreign_private() | {name for _, name in overridden()}
    idle = [f"{owner}.{name}" for owner, names in PRIVATE.items() for name in names if name not in used]
    idle += [f"{owner}.{name}" for owner, names in UNDOCUMENTED.items() for name in names if not places(name)]
    assert not idle, f"Not used any more, take them out of the list: {idle}"


def test_a_name_that_is_gone_is_noticed():
    assert not is_there("transformers.Trainer", "_no_such_method")
    assert not is_there("transformers.NoSuchClass", "_init_weights")
    assert not is_there("transformers.Trainer.save_model", "_no_such_argument")
    assert not is_there("torch", "_foreach_no_such_")


if __name__ == "__main__":
    for owner, name, why in LINES:
        print(f"{owner}.{name}: {why}\n    {', '.join(places(name))}")

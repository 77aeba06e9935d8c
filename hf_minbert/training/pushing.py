"""Uploads to the Hub during and after training, with the same files and card as `minbert publish`."""

from __future__ import annotations

import logging
import shutil
import tempfile
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from ..errors import MinBertError
from ..io import write_atomically
from ..publishing.card import model_card
from ..publishing.environment import environment
from ..publishing.files import CARD, Upload, collect, is_adapter_alone, plain_recipe
from ..publishing.publish import commit, create, in_words
from ..publishing.saved import SavedModel

if TYPE_CHECKING:
    from concurrent.futures import Future

    from huggingface_hub import CommitInfo

logger = logging.getLogger(__name__)


class PushesToHub(Trainer):
    """Overrides the uploads of the stock `Trainer`: no optimizer state, no training arguments, no token."""

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository `args.hub_model_id` on the first process, if it does not exist.

        Raises:
            MinBertError: as `publish.create`; or `hub_strategy` requests complete checkpoints.
        """
        args = self.args
        if args.hub_strategy in ("checkpoint", "all_checkpoints"):
            raise MinBertError(
                f"`hub_strategy: {HubStrategy(args.hub_strategy).value}` would publish the optimizer's state and the "
                f"training arguments. Use every_save or end, and keep checkpoints where they are."
            )
        if not self.is_world_process_zero():
            return
        name = args.hub_model_id or self._folder.absolute().name
        private = args.hub_private_repo if private is None else private
        self._hub_token = token or args.hub_token
        self.hub_model_id = create(name, self._folder, private=bool(private), token=self._hub_token).repo_id
        self.push_in_progress = None

    def create_model_card(self, *values: Any, **named: Any) -> None:
        """Writes `README.md` into `output_dir`, for the model that was saved there. See `card.model_card`.

        Args:
            values, named: the arguments of the stock method. `language`, `license` and `finetuned_from` have the Hub's
                values; `finetuned_from` is the id of the base model. The others have no effect, because the card is
                made from the model and the run. This is logged.
        """
        if not self.is_world_process_zero():
            return
        given = signature(Trainer.create_model_card).bind(self, *values, **named).arguments
        known = {name: given.get(name) for name in ("language", "license")}
        base_model = given.get("finetuned_from")
        others = given.keys() - {"self", "finetuned_from", *known}
        if idle := sorted(name for name in others if given[name] is not None):
            logger.warning("No effect on the model card, which is made from the run: %s.", ", ".join(idle))
        uploads = collect(self._folder, is_adapter_alone(self._folder), base_model)
        saved = self._saved(self._folder)
        card = model_card(saved, self._repo_name(), uploads, base_model=base_model, **known)
        write_atomically(self._folder / CARD, card)

    # The stock annotation knows no future, and no other process than the first.
    def push_to_hub(  # ty: ignore[incompatible-method-override]
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future | None:
        """Saves the model and uploads the files of `minbert publish`. `kwargs` go to `create_model_card`.

        Returns:
            the commit, or its future unless `blocking`; on processes other than the first, `None`.

        Raises:
            MinBertError: the Hub refuses the upload. The model is saved nevertheless.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        self._finish_current_push()
        uploads = collect(self._folder, is_adapter_alone(self._folder), kwargs.get("finetuned_from"))
        uploads.append(Upload(CARD, self._folder / CARD))
        return self._commit(uploads, commit_message, token, revision, run_as_future=not blocking)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads the model of a checkpoint while training continues. Errors are logged and do not stop it."""
        if not self.is_world_process_zero() or self.args.hub_strategy == "end":
            return
        running = self.push_in_progress
        if running is not None and running.is_done():
            running = None
        if running is not None and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        copy = tempfile.TemporaryDirectory()  # the checkpoint may be deleted meanwhile
        try:
            uploads = self._copied(Path(checkpoint_folder), Path(copy.name))
            message = f"Training in progress, step {self.state.global_step}"
            job = cast("Future", self._commit(uploads, message, None, None, run_as_future=True))
        except MinBertError as error:
            logger.warning("The checkpoint of step %d was not uploaded: %s", self.state.global_step, error)
            return

        def ended(job: Future) -> None:
            copy.cleanup()
            if job.exception() is not None:
                logger.warning("%s: not uploaded, because the Hub refused it: %s", message, job.exception())

        job.add_done_callback(ended)
        jobs = [] if running is None else cast("list[Future]", running.jobs)
        self.push_in_progress = PushInProgress(cast(Any, [*jobs, job]))  # the library annotates its list as one job

    def _copied(self, checkpoint: Path, copy: Path) -> list[Upload]:
        uploads = collect(checkpoint, is_adapter_alone(checkpoint))
        card = model_card(self._saved(checkpoint), self._repo_name(), uploads)
        for place, upload in enumerate(uploads):
            if isinstance(upload.content, Path):
                uploads[place] = Upload(upload.path, Path(shutil.copy2(upload.content, copy / upload.path)))
        return [*uploads, Upload(CARD, card.encode())]

    def _commit(
        self, uploads: list[Upload], message: str | None, token: str | None, revision: str | None, **given: Any
    ) -> CommitInfo | Future:
        from huggingface_hub import HfApi

        repo = self._repo_name()
        with in_words(repo, self._folder, go_on=f"Send it by: minbert publish {self._folder} {repo}"):
            api = HfApi(token=token or self._hub_token)
            return commit(api, repo, uploads, message or "", revision=revision or self.args.hub_revision, **given)

    def _repo_name(self) -> str:
        return self.hub_model_id or self._folder.absolute().name

    def _saved(self, folder: Path) -> SavedModel:
        """Returns the records of the folder, completed by those of the trainer."""
        saved, recipe = SavedModel.of(folder), self._folder / "recipe.yaml"
        return replace(
            saved,
            recipe=saved.recipe or (plain_recipe(recipe) if recipe.is_file() else {}),
            metrics=saved.metrics or self._known_metrics(),
            environment=saved.environment or environment(self.args),
        )

    def _known_metrics(self) -> dict[str, Any]:
        """Returns the scores of the current model and the costs of training, from the log."""
        state, best = self.state, None
        if self.args.load_best_model_at_end and not self.is_in_train:
            best = state.best_global_step
        scores = [entry for entry in state.log_history if any(name.startswith("eval_") for name in entry)]
        scores = [entry for entry in scores if best is None or entry["step"] == best][-1:]
        took = [entry for entry in state.log_history if "train_runtime" in entry][-1:]
        chosen = {"best_metric": state.best_metric, "best_step": best} if best is not None else {}
        given = {"metric_for_best_model": self.args.metric_for_best_model, "seed": self.args.seed}
        measured = {name: value for entry in (*took, *scores) for name, value in entry.items()}
        return {**measured, **chosen, **given, "global_step": state.global_step}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """As the stock one; but the arguments that are saved with the model hold no token."""
        token, self.args.hub_token = self.args.hub_token, None
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token

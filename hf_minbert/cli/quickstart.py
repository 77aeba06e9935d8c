"""`minbert quickstart`"""

from __future__ import annotations

from typing import Annotated

import typer

from .heavy import importing


def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Lines that replace those of the recipe quickstart."),
    ] = None,
) -> None:
    """Download a small BERT, train it on the sample in the package, and show scores and predictions."""
    import typing

    from ..settings.dotted import Value
    from ..settings.recipe import read_recipe, split_recipe
    from ..settings.words import check_words

    words = overrides or []
    values = read_recipe("quickstart", words)
    check_words(values)
    with importing():
        from ..data.files import load_split
        from ..pretrained.weights import fetch_weights
        from ..run.quickstart import answers, score_table
        from ..run.train import train
        from ..settings.tasks import get_tasks
        from ..training.args import MultiTaskTrainingArguments

    split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))  # a wrong word is answered at once
    if not any(word.startswith("model_name_or_path=") for word in words):
        folder = str(fetch_weights())
        values["model_name_or_path"] = Value(folder, folder)
    metrics = train(values)
    if not metrics:  # another process than the first
        return
    settings, _ = split_recipe(values, typing.get_type_hints(MultiTaskTrainingArguments))
    tasks = [task for task in get_tasks(settings.tasks) if f"eval_{task.name}_{task.metric}" in metrics]
    labels = {task.name: load_split(task, settings.data_dir, "dev", labelled=True)["label"] for task in tasks}
    typer.echo(f"\nScores on rows that the model was not trained on. "
               f"One answer: the best score of a model that gives the same answer for every row.\n"
               f"{score_table(tasks, metrics, labels)}\n\nThe saved model, asked something new:\n"
               f"{answers(settings.output_dir, tasks)}\n\nAsk it more:\n"
               f'  minbert predict {settings.output_dir} --task {tasks[0].name} --text "..."')  # fmt: skip

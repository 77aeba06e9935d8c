"""Writes the page of `demo.py` as a Hugging Face Space. It needs only torch, transformers and gradio."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path

from ..errors import MinBertError
from ..io import check_writable, write_atomically
from ..model.saving import plugins_of, why_it_stays
from ..pretrained.loading import is_adapter, load_config, tasks_of
from ..pretrained.prediction import Predictor

#: What the page is made of, by its place in the package; it keeps that place under `minbert_page`.
PAGE = (
    "publishing/demo.py", "evaluation/attribution.py", "model/inference.py", "model/kinds.py", "model/packing.py",
    "model/spans.py",
)  # fmt: skip
WRITTEN = ("app.py", "requirements.txt", "README.md", "minbert_page", "model")
APP = '''"""The page of a Hugging Face Space. On a machine of your own: python app.py"""

from pathlib import Path

from transformers import AutoModelForSequenceClassification, AutoTokenizer

from minbert_page.publishing.demo import launch, make_page

# The model brings its own code, hence trust_remote_code.
MODEL = {model}
tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
model = AutoModelForSequenceClassification.from_pretrained(MODEL, trust_remote_code=True, dtype="float32")
demo = make_page(model.eval(), tokenizer, {title!r})

if __name__ == "__main__":
    launch(demo)
'''
README = """---
title: {quoted}
sdk: gradio
sdk_version: {gradio}
python_version: "{python}"
app_file: app.py
{models}---

# {title}

Type a sentence or two: every task of {what} answers, and shows the words that influenced its answer.

On a machine of your own:

```bash
pip install -r requirements.txt
python app.py
```
"""


def export_space(model: str, folder: Path) -> None:
    """Writes app.py, requirements.txt, README.md, the page's code and, unless `model` is a Hub id, the model.

    The versions in requirements.txt are the installed ones.

    Raises:
        MinBertError: there is no such model, it has no tasks, or the folder already has such files.
    """
    check_writable(folder / "app.py")
    there = [name for name in WRITTEN if (folder / name).exists()]
    if there:
        raise MinBertError(f"--export-space {folder} holds {there[0]} already. Delete it, or give another folder.")
    config = load_config(model)
    tasks_of(config, model)
    title = Path(model).resolve().name
    # An adapter goes along too, merged: by its id alone it would need peft there, and its heads would be lost.
    copied = Path(model).exists() or is_adapter(model)
    if copied:
        predictor = Predictor.from_pretrained(model, device="cpu")
        plugins = plugins_of(config.tasks or ())
        for name in plugins:
            if (why := why_it_stays(name, plugins)) is not None:
                raise MinBertError(f"The Space would lack the plugin {name!r}, as {why}.")
        predictor.model.save_pretrained(folder / "model")  # with its code
        predictor.tokenizer.save_pretrained(folder / "model")
    place = 'str(Path(__file__).parent / "model")' if copied else repr(model)
    write_atomically(folder / "app.py", APP.format(model=place, title=title))
    versions = {name: metadata.version(name).split("+")[0] for name in ("torch", "transformers", "gradio")}
    write_atomically(folder / "requirements.txt", "".join(f"{name}=={found}\n" for name, found in versions.items()))
    readme = README.format(
        title=title,
        quoted=json.dumps(title),
        gradio=versions["gradio"],
        python=".".join(platform.python_version_tuple()[:2]),
        models="" if copied else f"models: [{model}]\n",
        what="the model in `model`" if copied else f"[{model}](https://huggingface.co/{model})",
    )
    write_atomically(folder / "README.md", readme)
    for name in PAGE:
        write_atomically(
            folder / "minbert_page" / name, (Path(__file__).parents[1] / name).read_text(encoding="utf-8")
        )

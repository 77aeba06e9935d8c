import json
import shutil


def test_x(tagged_run, minbert, assistant, tmp_path):
    print(json.loads((tagged_run / "metrics.json").read_text()))
    for words in (
        ["evaluate", tagged_run],
        ["evaluate", tagged_run, "--input", assistant / "assistant" / "ner-dev.conll", "--task", "ner"],
        ["predict", tagged_run, "--task", "ner", "--text", "the man plays the dog, is it bad?"],
        [
            "predict",
            tagged_run,
            "--task",
            "ner",
            "--input",
            assistant / "assistant" / "ner-dev.conll",
            "--output",
            tmp_path / "o.jsonl",
        ],
        [
            "predict",
            tagged_run,
            "--task",
            "ner",
            "--input",
            assistant / "assistant" / "ner-dev.conll",
            "--output",
            tmp_path / "o.csv",
        ],
        ["report", tagged_run, "--output-dir", tmp_path / "report"],
        ["publish", tagged_run, "me/x", "--dry-run"],
        ["export", tagged_run, "--to", "classifier", "--task", "ner", "--output-dir", tmp_path / "c"],
        ["export", tagged_run, "--to", "onnx", "--output-dir", tmp_path / "on"],
        ["export", tagged_run, "--to", "encoder", "--output-dir", tmp_path / "en"],
        ["export", tagged_run, "--to", "sentence-transformers", "--task", "ner", "--output-dir", tmp_path / "st"],
    ):
        e = minbert(*words)
        with open("/tmp/tags_out.txt", "a") as f:
            print("#####", *words[:1], *words[2:], "->", e.status, "\n", e.out[-3500:], "\nERR", e.err[-1500:], file=f)
    shutil.copytree(tagged_run, "/tmp/tagged_run", dirs_exist_ok=True)

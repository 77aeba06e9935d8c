import json, shutil, pytest
from pathlib import Path
def test_x(minbert, tmp_path):
    run=Path("/tmp/tagged_run"); 
    for words in (
        ["report", run, "--output-dir", tmp_path/"report"],
        ["publish", run, "me/x", "--dry-run"],
        ["export", run, "--to", "classifier", "--task", "ner", "--output-dir", tmp_path/"c"],
        ["export", run, "--to", "onnx", "--output-dir", tmp_path/"on"],
        ["export", run, "--to", "encoder", "--output-dir", tmp_path/"en"],
        ["export", run, "--to", "sentence-transformers", "--task", "ner", "--output-dir", tmp_path/"st"],
    ):
        try:
            e = minbert(*words)
            s, o, r = e.status, e.out, e.err
        except Exception as ex:
            import traceback
            s, o, r = "EXC", "", traceback.format_exc()
        with open("/tmp/tags_out.txt","a") as f:
            print("#####", *words[:1], *words[2:], "->", s, "\n", o[-6500:], "\nERR", r[-2500:], file=f)
    shutil.copytree(tmp_path/"report", "/tmp/tags_report", dirs_exist_ok=True)

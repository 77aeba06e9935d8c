"""Packaging of hf_minbert: `pip install .` for use, `pip install -e ".[test]"` for work on it."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent

# Read as text: an import would need torch and transformers before pip has installed them.
VERSION = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "hf_minbert" / "__init__.py").read_text(), re.MULTILINE)[1]

# Two sets are tested: the lowest versions that are named here (scripts/constraints-lowest.txt) and the newest
# (scripts/constraints.txt). Every version of both has wheels for Python 3.11, 3.12 and 3.13. Each transformers narrows
# huggingface-hub further, 5.17 to 1.x. What an older version lacks: accelerate 1.13 splits layers between devices,
# huggingface-hub 1.20 gives up an upload whose connection drops once, scipy 1.14 has another bootstrap, onnxscript 0.5
# does not know torch 2.11, and onnxruntime 1.31 cannot quantize what torch 2.11 exports.
REQUIREMENTS = [
    "torch>=2.11",
    "transformers>=5.17,<6",
    "accelerate>=1.14",
    "datasets>=4.5",
    "evaluate>=0.4.6",
    "huggingface-hub>=1.21,<3",
    "peft>=0.19.1",
    "numpy>=2.1",
    "safetensors>=0.8",
    "filelock>=4.3.1",
    "typer>=0.20",
    "pyyaml>=6.0.2",
    "scipy>=1.15",
    "scikit-learn>=1.5.2",
]
# Its weightings as aggregators, with the solver that UPGrad and DualProj need.
TORCHJD = ["torchjd[quadprog-projector]>=0.18"]
# `minbert search --method optuna`, and the plot of any search.
SEARCH = ["optuna>=4.5", "matplotlib>=3.9.2"]
# `minbert report`: its pictures and its page. (torch brings jinja2 too, for purposes of its own.)
REPORT = ["matplotlib>=3.9.2", "jinja2>=3.1.6"]
# `report_to: tensorboard`.
TENSORBOARD = ["tensorboard>=2.20"]
# The page of `minbert demo`.
DEMO = ["gradio>=6.31,<7"]
# `minbert export --to onnx`: torch's exporter writes through onnxscript, and onnxruntime runs what it wrote.
EXPORT = ["onnx>=1.19", "onnxscript>=0.6", "onnxruntime>=1.32"]
# playwright drives the browser that Debian has, and downloads none. Both sets have the same ruff and the same ty: what
# they find differs from version to version.
TEST = ["pytest>=8.2", "pytest-xdist>=3.8", "hypothesis>=6.100", "ruff>=0.17.6", "ty>=0.0.108", "playwright>=1.50"]
TEST += [*TORCHJD, *SEARCH, *REPORT, *TENSORBOARD, *DEMO, *EXPORT, "sentence-transformers>=5.2"]
# The documentation's site: CONTRIBUTING.md has the command. The tests do without.
DOCS = ["sphinx>=9.0.4", "furo>=2025.12.19", "myst-parser>=5.2"]


class BuildWithRecipes(build_py):
    """Puts the recipes inside the package: in a clone they lie beside it, where `recipes_folder` finds them too."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "recipes", Path(self.build_lib) / "hf_minbert" / "recipes", dirs_exist_ok=True)


setup(
    name="hf_minbert",
    version=VERSION,
    description="A BERT written by hand and fine-tuned on several sentence tasks at once, as a Hugging Face model",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["hf_minbert", "hf_minbert.*"]),
    package_data={"hf_minbert": ["py.typed", "data/samples/*", "reporting/*.j2"]},
    cmdclass={"build_py": BuildWithRecipes},
    python_requires=">=3.11",
    install_requires=REQUIREMENTS,
    extras_require={
        "torchjd": TORCHJD,
        "search": SEARCH,
        "report": REPORT,
        "tensorboard": TENSORBOARD,
        "demo": DEMO,
        "export": EXPORT,
        "test": TEST,
        "docs": DOCS,
        "all": [*TEST, *DOCS],
    },
    entry_points={"console_scripts": ["minbert = hf_minbert.cli:main"]},
    keywords=["bert", "multitask learning", "fine-tuning", "transformers", "sentence similarity", "paraphrase"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

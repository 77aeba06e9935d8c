"""Settings of the documentation's site, which `python -m sphinx -W -c docs . build/site` builds.

The source folder is the whole repository, so that a link from a page to a recipe or to a results page is the same on
GitHub and on the site.
"""

from pygments.lexers.special import TextLexer

import hf_minbert

project = "hf_minbert"
author = "The hf_minbert authors"
copyright = author
release = version = hf_minbert.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "recipes/**.md"]
exclude_patterns = [".*", "build", "hf_minbert", "runs", "scripts", "tests"]

myst_heading_anchors = 4  # `page.md#a-heading`, as on GitHub
myst_enable_extensions = ["deflist"]

autodoc_member_order = "groupwise"
autodoc_inherit_docstrings = False  # those of transformers are documented there
autodoc_typehints = "none"  # the docstrings state types and shapes
default_role = "code"  # docstrings have names between single backquotes
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"hf_minbert {release}"


def setup(app):
    app.add_lexer("csv", TextLexer)  # GitHub colours it, Pygments does not know it

"""How Sphinx makes a site of the pages in this folder: `make docs`. All of it is local: the site works without a network.

Why Sphinx with MyST (pages stay Markdown that GitHub shows) and the theme of PyData, as of November 2026:

- every warning can be an error: a link to a page or a heading that is not there, a docstring that cannot be read, a page in no list,
  a type in a signature that nothing explains;
- upkeep: Sphinx 9.2 is of October 2026, MyST-Parser 5.2 and the theme 0.24 of November 2026, each kept by a group;
- Material for MkDocs ends in May 2027, and MkDocs 1.x, on which it stands, had its last release in August 2024;
- Zensical, its successor, is at 0.1: it passes over plugins that it does not know without a word, calls its own support of mkdocstrings
  preliminary, and mkdocstrings still brings MkDocs 1.x along. Worth another look once it is 1.0: the pages would stay as they are;
- other themes: Furo's last release is of December 2025.
"""

from __future__ import annotations

import sys
from pathlib import Path

from protperf import __version__

sys.path.insert(0, str(Path(__file__).parent))  # for `made`

project = "protperf"
author = "The protperf developers"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "made"]
exclude_patterns = ["paper/*"]
nitpicky = True
nitpick_ignore_regex = [
    # of other packages, whose inventories would have to be fetched
    ("py:.*", r"(torch|np|numpy|collections|pathlib|optional|T)\b.*"),
    ("py:class", r"(Iterable|Iterator|Mapping|Sequence|Path|Tensor|ndarray|Module)"),
]
nitpick_ignore = [
    # on no page: what is passed on as it is
    ("py:class", name)
    for name in (
        "protperf.attention.reformer.Hashing",
        "protperf.config.model.ModelConfig",
        "protperf.config.objective.ObjectiveConfig",
        "protperf.formats.embedding_npz.NpzFile",
        "protperf.formats.embedding_parquet.ParquetFile",
        "protperf.formats.mutations.Substitution",
        "protperf.formats.open_files.OpenFiles",
        "protperf.model.ModelState",
    )
]
myst_heading_anchors = 3
default_role = "literal"  # in docstrings `this` is code
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = "protperf"
html_static_path = ["static"]
html_css_files = ["protperf.css"]
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": [], "tutorial": []}
html_theme_options = {
    "logo": {"text": "protperf"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}

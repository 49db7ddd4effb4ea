"""Configure Sphinx, which `make docs` runs. Its source folder is the repository.

A page's address is its path in the repository, so links work on the site and in the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

from speedkit_jupyter import __version__
from speedkit_jupyter.report.verdicts import project_urls

sys.path.append(str(Path(__file__).parent / "_ext"))

project = "SpeedKit for Jupyter"
author = "SpeedKit contributors"
copyright = "SpeedKit contributors, Apache-2.0"
release = version = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_pages",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/*.ipynb", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "tests", "speedkit_jupyter", "configs", "**/_ext"]

nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "text/html", 5)]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"
smartquotes_action = "q"  # options keep their two hyphens
highlight_language = "text"
autodoc_typehints = "signature"
autodoc_default_options = {"exclude-members": "model_config, model_post_init"}
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_use_ivar = True
# Annotations name classes of torch and of pydantic, which have no page here.
nitpick_ignore_regex = [("py:.*", ".*")]
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = project
html_baseurl = project_urls().get("Documentation", "")
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "monokai"
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
if repository := project_urls().get("Repository"):  # for edit links
    html_theme_options |= {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "",
    }

"""Beside pyproject.toml: README.md as it is shown on an index, where links into this repository
lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

_RELATIVE_LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?://)[^)]*\)")

setup(
    long_description=_RELATIVE_LINK.sub(r"\1", Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)

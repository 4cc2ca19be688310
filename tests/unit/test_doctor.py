"""`doctor`: what it says of a build."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from llama_dflash.builds import Build
from llama_dflash.cli.doctor import doctor

SERVER = "print('version: 1')"


@pytest.mark.parametrize(
    ("page", "reason", "want"),
    [
        ("built", "npm 11.1.0, Node.js 22.13.0", "built (npm 11.1.0, Node.js 22.13.0); llama-server shows it at /"),
        ("none", "no npm found", "not built: no npm found; the HTTP API is complete without it; for the page, build again with npm"),
    ],
)
def test_the_web_page_is_told(make_build: Callable[..., Build], page: str, reason: str, want: str) -> None:
    build = make_build(SERVER, page=page, page_reason=reason)
    done = CliRunner().invoke(doctor, ["--native", str(build.package), "--json"])
    facts = json.loads(done.stdout)
    assert facts["web_page"] == want
    assert facts["build"]["page"] == page
    assert f"web_page:          {want}" in CliRunner().invoke(doctor, ["--native", str(build.package)]).stdout

"""The page's files: open to all, shut to scripts from elsewhere, and part of the package."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from server.flags import make_parser
from server.settings import parse, server_settings
from server.state import ServerLimits

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "server" / "page").iterdir())
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg"}


async def test_the_page_needs_no_key_and_nothing_from_elsewhere(start):
    server = await start(api_keys=("sk-one",))
    for path in ("/", *[f"/page/{file.name}" for file in FILES]):
        reply = await server.get(path)
        assert reply.status == 200
        assert reply.headers["content-type"].startswith(KINDS[Path(path).suffix or ".html"])
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        links = re.findall(rb"https?://[^\"'\s>]+", reply.raw)
        assert set(links) <= {b"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("name", ["none.js", "..%2fapp.py", "%2e%2e%2fauth.py", "__init__.py"])
async def test_no_other_file_is_given_out(server, name):
    assert (await server.get(f"/page/{name}")).status == 404


def test_no_script_writes_html():
    pattern = re.compile(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b")
    assert not [file.name for file in FILES if pattern.search(file.read_text())]
    assert not re.search(r"\son\w+=|<script>|style=", (ROOT / "server/page/index.html").read_text())


async def test_every_file_that_is_named_is_there(server):
    named = {name for file in FILES for name in re.findall(r'"\./(\w+\.js)"', file.read_text())}
    named |= set(re.findall(r'"page/([\w.]+)"', (ROOT / "server/page/index.html").read_text()))
    assert named == {file.name for file in FILES} - {"index.html"}


async def test_the_page_is_there_under_the_root_path_too(start):
    server = await start(limits=ServerLimits(root_path="/llm"))
    assert (await server.get("/llm/")).raw == (await server.get("/")).raw
    assert (await server.get("/llm/page/app.js")).status == 200


async def test_without_ui_there_is_no_page(start):
    args = parse(make_parser("x"), ["model", "--no-ui"])
    server = await start(limits=server_settings(args).limits)
    assert [(await server.get(path)).status for path in ("/", "/page/app.js")] == [404, 404]
    assert (await server.get("/v1/engine/state")).status == 200


def test_a_wheel_holds_every_file(tmp_path):
    for name in ("pyproject.toml", "README.md", "server"):
        (tmp_path / name).symlink_to(ROOT / name)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert {f"server/page/{file.name}" for file in FILES} <= set(zipfile.ZipFile(wheel).namelist())

"""The page's built files are what its sources give, small, whole, and free of other hosts."""

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx2 as httpx
from page_driver import missing
from page_server import PageServer

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "apps" / "web"
BUILT = ROOT / "mlxinfer" / "server" / "page" / "built"
MAX_BYTES, MAX_FONT_BYTES = 250_000, 300_000


def test_a_rebuild_gives_the_committed_files(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        missing("node", "apt-get install nodejs npm")
    if not (SOURCE / "node_modules" / "esbuild").is_dir():
        missing("esbuild", "npm ci --ignore-scripts --prefix apps/web")
    command = [str(node), str(SOURCE / "build.mjs"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    made = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(made) == sorted(file.name for file in BUILT.iterdir())
    changed = [name for name, data in made.items() if (BUILT / name).read_bytes() != data]
    assert changed == [], "run `node apps/web/build.mjs` and commit what it makes"


def test_the_page_is_small() -> None:
    sizes = {file: len(gzip.compress(file.read_bytes())) for file in BUILT.iterdir()}
    fonts = sum(size for file, size in sizes.items() if file.suffix == ".woff2")
    rest = sum(size for file, size in sizes.items() if file.suffix not in (".woff2", ".txt"))
    assert 100_000 < rest <= MAX_BYTES
    assert 0 < fonts <= MAX_FONT_BYTES


def test_versions_are_pinned_and_the_lock_names_no_registry() -> None:
    package = json.loads((SOURCE / "package.json").read_text())
    lock = json.loads((SOURCE / "package-lock.json").read_text())
    for name, version in package["devDependencies"].items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version), name
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
    assert "resolved" not in (SOURCE / "package-lock.json").read_text()


def test_every_file_is_served_without_a_key_and_the_rest_is_not(tmp_path: Path) -> None:
    from mlxinfer.server.keys import ApiKeys

    with PageServer(tmp_path, keys=ApiKeys.from_plain(["secret"])) as server:
        assert server.get("/").headers["content-type"] == "text/html; charset=utf-8"
        names = re.findall(r"/page/([\w.-]+)", server.get("/").text)
        names += re.findall(r"([\w-]+\.woff2)", server.get("/page/app.css").text)
        assert len(names) > 15
        for name in names:
            assert server.get(f"/page/{name}").status_code == 200, name
        etag = server.get("/page/app.js").headers["etag"]
        again = server.get("/page/app.js", headers={"if-none-match": etag})
        assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/features", "/history/conversations", "/hub/models", "/admin/state"):
            assert server.get(path).status_code == 401, path
        assert "no-store" in server.get("/page/features").headers["cache-control"]
        assert server.get("/page/../features.py").status_code in (401, 404)
        assert httpx.get(f"{server.url}/", headers={"host": "evil.example"}).status_code == 403


def test_files_are_sent_compressed_and_kept_by_their_hash(tmp_path: Path) -> None:
    with PageServer(tmp_path) as server:
        page = server.get("/")
        assert page.headers["cache-control"] == "no-cache"
        [script] = re.findall(r'src="(/page/app.js[^"]*)"', page.text)
        [styles] = re.findall(r'href="(/page/app.css[^"]*)"', page.text)
        font = re.findall(r"\./([\w.-]+woff2[^\"]*)", server.get(styles).text)[0]
        for path in (script, styles, f"/page/{font}"):
            assert "immutable" in server.get(path).headers["cache-control"], path
        for path in ("/page/app.js", "/page/app.js?v=older"):
            assert server.get(path).headers["cache-control"] == "no-cache"
        reply = server.get(script)
        assert reply.headers["content-encoding"] == "gzip"
        assert 2 * int(reply.headers["content-length"]) < len(reply.content)
        plain = server.get(script, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == reply.content == (BUILT / "app.js").read_bytes()


def test_styles_and_the_frame_name_no_other_host() -> None:
    for name in ("app.css", "index.html"):
        assert "http" not in (BUILT / name).read_text(), name


def test_licences_of_what_is_bundled_come_along() -> None:
    licences = (BUILT / "LICENSES.txt").read_text()
    for name in ("preact", "markdown-it", "dompurify", "highlight.js", "katex"):
        assert f"{name}\n{'=' * len(name)}\n" in licences

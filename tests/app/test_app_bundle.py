"""The bundle: Briefcase's configuration, its executable, and the `mlxinfer app` command."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import mlxinfer.app
from mlxinfer.cli._commands import app as app_command

BUNDLE = Path(__file__).parents[2] / "apps" / "menubar"
ROOT = BUNDLE.parents[1]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    result: dict[str, Any] = tomllib.loads((BUNDLE / "pyproject.toml").read_text())["tool"][
        "briefcase"
    ]
    return result


def test_the_bundle_is_for_apple_silicon_and_has_no_dock_icon(config: dict[str, Any]) -> None:
    app = config["app"]["mlxinfer_app"]["macOS"]
    assert app["universal_build"] is False
    assert app["min_os_version"] == "14.0"
    assert app["info"]["LSUIElement"] is True
    assert app["info"]["NSAppTransportSecurity"] == {"NSAllowsLocalNetworking": True}
    assert "another machine" in app["info"]["NSLocalNetworkUsageDescription"]


def test_the_bundle_s_files_and_versions_are_those_of_the_package(config: dict[str, Any]) -> None:
    app = config["app"]["mlxinfer_app"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert config["version"] == project["version"]
    assert config["license"] == project["license"]
    for file in config["license-files"]:
        assert (BUNDLE / file).is_file()
    assert (BUNDLE / app["icon"]).with_suffix(".icns").read_bytes()[:4] == b"icns"
    assert all((BUNDLE / source / "__main__.py").is_file() for source in app["sources"])
    assert [(BUNDLE / require).resolve() for require in app["requires"]] == [ROOT]
    [toga] = app["macOS"]["requires"]
    assert toga.startswith("toga-cocoa>=0.5.7")
    assert any(
        require.startswith("toga-cocoa>=0.5.7;")
        for require in project["optional-dependencies"]["app"]
    )


def test_the_workflow_of_macs_packages_the_bundle_and_keeps_it() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["macos"][
        "steps"
    ]
    [made] = [step["run"] for step in steps if "briefcase package" in step.get("run", "")]
    config = tomllib.loads((BUNDLE / "pyproject.toml").read_text())["tool"]["briefcase"]
    [(name, app)] = config["app"].items()
    assert f"cd {BUNDLE.relative_to(ROOT)} && " in made
    assert f"build/{name}/macos/app && ditto -c -k --keepParent {app['formal_name']}.app" in made
    [kept] = [step["with"] for step in steps if step.get("with", {}).get("name") == "mac-app"]
    assert kept["path"] == "apps/menubar/dist"


def executable(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the bundle's executable without a bundle."""
    return subprocess.run(
        [sys.executable, "-m", "mlxinfer_app", *arguments],
        cwd=BUNDLE,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_executable_is_the_command_and_stands_for_an_interpreter(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print('file', __name__, sys.argv[1:])")
    code = "import sys; print('code', __name__, sys.argv[1:])"
    assert executable("-P", str(program), "7").stdout == "file __main__ ['7']\n"
    assert executable("-c", code, "x").stdout == "code __main__ ['x']\n"
    for arguments in (("--version",), ("-m", "mlxinfer.cli", "--version")):
        done = executable(*arguments)
        assert done.stdout.startswith("mlxinfer, version "), done.stderr


def test_without_toga_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(**_: Any) -> None:
        raise ModuleNotFoundError("No module named 'toga'", name="toga")

    monkeypatch.setattr(mlxinfer.app, "main", main)
    done = CliRunner().invoke(app_command, [])
    assert done.exit_code == 1
    needed = 'pip install -e ".[app]" in a checkout of mlxinfer'
    assert done.output == f"Error: The menubar app needs Toga: {needed}\n"


def test_where_qt_would_abort_the_missing_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for program, said in (
        ("import ctypes; ctypes.CDLL('libnot-here.so.7')", "the library libnot-here.so.7,"),
        ("import os; os.abort()", "a screen,"),
    ):
        monkeypatch.setattr(mlxinfer.app, "TRY_QT", program)
        with pytest.raises(mlxinfer.app.ScreenError, match=f"need {said} which is not here"):
            mlxinfer.app.platform_of_this_system()


def test_a_second_start_needs_no_toga(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxinfer.app.instance import Instance

    shown: list[int] = []
    first = Instance(short_folder / "app.sock")
    first.listen(lambda: shown.append(1))
    monkeypatch.setitem(sys.modules, "toga", None)
    mlxinfer.app.main(folder=short_folder)
    first.close()
    assert shown == [1]

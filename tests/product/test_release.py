"""What a release would be: built, installed into a clean environment, used, type-checked."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import optfn

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "user_program.py"


def run(cwd: Path, *command: object) -> str:
    """Run a command where optfn is not next to it, with no path set; return what it writes."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return the folder of the sdist and of the wheel that is made from it, without an index."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(path for path in folder.iterdir() if path.is_dir())
    subprocess.run([*build, "-t", "wheel"], cwd=source, check=True)
    return folder


@pytest.fixture(scope="module")
def python(built, tmp_path_factory) -> Path:
    """Return the Python of an environment with the wheel; other packages are those of the tests."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(folder, *pip, "--no-index", "--no-deps", next(built.glob("*.whl")))
    packages = run(folder, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (Path(packages.strip()) / "others.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "optfn").rglob("*.py")}
    assert names == modules | {"optfn/py.typed"}


def test_the_wheel_runs_where_it_is_installed(python, tmp_path):
    """The program of the README, by the installed package; its version is the one of the source."""
    text = (ROOT / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    program += "import importlib.metadata; print(optfn.__file__)\n"
    program += "print(importlib.metadata.version('optfn'), optfn.__version__)\n"
    program += "import sys; print({'matplotlib', 'optfn.train.host_state'} & {*sys.modules})\n"
    file, versions, extras = run(tmp_path, python, "-c", program).splitlines()[-3:]
    assert python.parent.parent in Path(file).parents
    assert versions.split() == [optfn.__version__] * 2 and extras == "set()"


def test_the_version_is_in_one_place():
    """Neither pyproject.toml nor another file has a copy that could differ."""
    for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "README.md"):
        assert f'"{optfn.__version__}"' not in (ROOT / name).read_text()


def test_users_see_the_types(python, tmp_path):
    """mypy on a user's program finds its mistakes, and no others."""
    pytest.importorskip("mypy")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache" / "user"]
    assert "Success" in run(tmp_path, *mypy, "--python-executable", python, PROGRAM)


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_users_see_the_types_in_pyright(python, tmp_path):
    run(tmp_path, "pyright", "--pythonpath", python, PROGRAM)


@pytest.mark.skipif(
    "OPTFN_TEST_NETWORK" not in os.environ,
    reason="it installs from a package index: OPTFN_TEST_NETWORK=1",
)
def test_the_wheel_installs_with_its_dependencies(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(tmp_path, python, "-m", "pip", "install", "--quiet", next(built.glob("*.whl")))
    version = run(tmp_path, python, "-c", "import optfn; print(optfn.__version__)")
    assert version.strip() == optfn.__version__

"""A real Chromium for tests: the machine's, or Debian's package unpacked into the cache, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sinks.testing.servers.maven import cache_folder

_NAMES = ("chromium", "chromium-headless-shell", "google-chrome")


def playwright() -> Any:
    """The module `playwright.sync_api`, from the environment or the cache. It comes without a browser of its own."""
    folder = cache_folder() / "playwright"
    try:
        import playwright.sync_api as found
    except ModuleNotFoundError:
        if not (folder / "playwright").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
            part = folder.with_suffix(f".{os.getpid()}")
            done = subprocess.run([*pip, "--target", part, "playwright"], capture_output=True, text=True, timeout=180)
            if done.returncode:
                pytest.skip(f"Playwright cannot be had: {done.stderr.strip()[-200:]}")
            part.rename(folder)
        sys.path.append(str(folder))
        import playwright.sync_api as found
    return found


def chromium() -> tuple[Path, dict[str, str]]:
    """The program, and the environment that it needs."""
    if found := next(filter(None, map(shutil.which, _NAMES)), None):
        return Path(found), dict(os.environ)
    folder = cache_folder() / "chromium"
    if not folder.exists():
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            pytest.skip("Chromium cannot be had: there is no apt-get to fetch it")
        part = folder.with_suffix(f".{os.getpid()}")
        part.mkdir(parents=True)
        planned = _apt(["install", "--simulate", "--no-install-recommends", "chromium-headless-shell"], part)
        packages = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
        _apt(["download", *packages], part)
        for package in part.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, part], check=True, timeout=120)
            package.unlink()
        part.rename(folder)
    libraries = [str(path) for path in (folder / "usr/lib").glob("*-linux-gnu")]
    libraries += [f"{path}/pulseaudio" for path in libraries]
    return folder / "usr/lib/chromium/chromium-headless-shell", {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}


def _apt(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(["apt-get", "-q", *arguments], cwd=folder, capture_output=True, text=True, timeout=240)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"Chromium cannot be had: apt-get says {done.stderr.strip()[-200:]}")
    return done.stdout

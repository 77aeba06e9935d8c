"""A real browser for the pages that the package makes: Debian's Chromium, driven by Playwright.

`.ci/run` installs the browser. Where it or Playwright is missing, these tests are skipped and say why.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WAIT = 120_000  # milliseconds, on a busy machine


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium that asks no server of its own for anything."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip("there is no Chromium; on Debian: apt-get install chromium")
    # As root, which a container's user often is, Chromium does not start with its sandbox.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments, timeout=WAIT)
        yield browser
        browser.close()


@pytest.fixture
def browser_page(browser) -> Iterator[Page]:
    """An empty page of desktop width; `set_viewport_size` makes it a phone's."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT)
    yield context.new_page()
    context.close()


@pytest.fixture
def console_errors(browser_page) -> list[str]:
    """What goes wrong in `browser_page` from here on: errors in its console, and scripts that raise."""
    errors: list[str] = []
    browser_page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    browser_page.on("pageerror", lambda error: errors.append(str(error)))
    return errors

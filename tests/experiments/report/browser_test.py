"""A report in headless Chromium: without errors, with every section visible, sorted tables, axe-core, phones and the
dark mode."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxret.experiments.report.write_report import write_report
from tests.experiments.report.write_report_test import SECTIONS

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
axe = pytest.importorskip("axe_core_python", reason="axe-core is not installed: pip install axe-core-python")

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a browser without network access."""
    if not CHROMIUM or not DRIVER:
        pytest.skip("chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, NO_NETWORK):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("browser") / "report.html"
    return write_report([str(runs / "dual"), str(runs / "layers")], out).as_uri()


def show(browser: Any, address: str, width: int = 1280, scheme: str = "light") -> None:
    """Open a page in a window of this width, in the light or dark mode."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_nothing_and_the_console_is_empty(browser: Any, report: str, width: int, scheme: str) -> None:
    show(browser, report, width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    browser.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    run = "axe.run(document).then(arguments[arguments.length - 1])"
    browser.set_script_timeout(120)
    problems = browser.execute_async_script(run)["violations"]
    assert [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in problems] == []
    assert browser.get_log("browser") == []


def test_control_axe_reports_a_defect(browser: Any, report: str) -> None:
    """The defect is a picture without a name."""
    show(browser, report)
    browser.execute_script("document.querySelector('figure svg').removeAttribute('aria-label')")
    browser.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    problems = browser.execute_async_script("axe.run(document).then(arguments[arguments.length - 1])")["violations"]
    assert "svg-img-alt" in [one["id"] for one in problems]


def test_every_section_is_visible_and_fits_a_phone(browser: Any, report: str) -> None:
    show(browser, report, 390)
    heights = browser.execute_script(
        "return [...document.querySelectorAll('section')].map((one) => [one.id, one.offsetHeight])"
    )
    assert tuple(name for name, _ in heights) == SECTIONS
    assert min(height for _, height in heights) > 60
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390, (
        "tables scroll, but the page does not"
    )
    wide = "return [...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)"
    assert browser.execute_script(wide), "control: a table is wider than a phone"


def test_dark_mode_is_dark(browser: Any, report: str) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    ink = "return getComputedStyle(document.querySelector('figure svg text')).fill.match(/\\d+/g).map(Number)"
    show(browser, report, scheme="light")
    light = browser.execute_script(colour), browser.execute_script(ink)
    show(browser, report, scheme="dark")
    dark = browser.execute_script(colour), browser.execute_script(ink)
    assert (min(light[0]) > 200, max(light[1]) < 80) == (True, True)
    assert (max(dark[0]) < 60, min(dark[1]) > 200) == (True, True), "pictures are dark, too"


def test_a_table_is_sorted_by_keyboard(browser: Any, report: str) -> None:
    show(browser, report)
    table = "document.querySelector('#quality table')"
    column = f"return [...{table}.tBodies[0].rows].map((row) => Number(row.cells[2].dataset.value))"
    before = browser.execute_script(column)
    button = browser.execute_script(f"return {table}.querySelectorAll('thead button')[2]")
    button.send_keys("\ue007")  # Enter
    assert browser.execute_script(column) == sorted(before, reverse=True)
    button.send_keys(" ")
    assert browser.execute_script(column) == sorted(before)
    assert browser.execute_script(f"return {table}.querySelectorAll('thead th')[2].ariaSort") == "ascending"
    names = f"return [...{table}.tBodies[0].rows].map((row) => row.cells[0].textContent)"
    browser.execute_script(f"return {table}.querySelectorAll('thead button')[0]").send_keys("\ue007")
    assert browser.execute_script(names) == ["dual", "layers"]


def test_missing_numbers_are_sorted_last(browser: Any, report: str) -> None:
    show(browser, report)
    table = "document.querySelector('#quality table')"
    browser.execute_script(
        f"const cell = {table}.tBodies[0].rows[0].cells[2]; cell.removeAttribute('data-value'); cell.textContent = '–';"
    )
    last = f"return [...{table}.tBodies[0].rows].at(-1).cells[2].textContent"
    button = browser.execute_script(f"return {table}.querySelectorAll('thead button')[2]")
    for _ in range(2):  # descending, then ascending
        button.send_keys(" ")
        assert browser.execute_script(last) == "–"


def test_the_page_is_rendered(browser: Any, report: str, tmp_path: Path) -> None:
    """A screenshot has more than a few colours: text, pictures and cards."""
    image = pytest.importorskip("PIL.Image")
    show(browser, report)
    browser.save_screenshot(str(tmp_path / "report.png"))
    with image.open(tmp_path / "report.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**24)) > 50
